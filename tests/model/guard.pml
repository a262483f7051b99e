/* What ranks tell each other where nothing is scaled: StepGuard, steps by a norm, the limit of skips.
 *
 * RANKS ranks make up to CALLS calls, the same on all, in any order that the model checker can think
 * of; optimizer 0 is plain, optimizer 1 fused. Names are those of the code; docs/architecture.md has
 * the table. What scaler.pml has (Join, scales, what is kept) is not here again.
 *
 *   -DRANKS=3 -DCALLS=4     how many
 *   -DDEVICE                the host reads replies and outcomes of fused steps at the next call
 *   -DERROR                 one look, on any rank, raises
 *   -DDIFFERS               one call of rank 0 is left out, is another, is about another optimizer, or
 *                           has another limit of the norm
 *   -DCATCHES               a user catches what all ranks raise, and goes on
 *   -DGROUPS                with new groups, in which rank 0 was replaced
 *   -DLIMIT=2               max_consecutive_skips
 *   -DASKS                  any rank alone may ask for its counts before any call
 *   -DABSENT                in any look an optimizer may have no gradient on a rank
 *   -DFAILS                 one step of each rank may raise after the ranks have agreed to step
 *   -DREPORTS               rank 0 alone calls nonfinite_report() where the others call update(), and
 *                           DDP reduces gradients after each update()
 *   -DGROWS                 in any norm any rank may have more gradients, and ask for a comparison
 *   -DREQUESTS              any rank may request a skip (skip_if) in a step, which may have a message of
 *                           its own after unscale_
 *   -DUPDATES               one step of each rank may write inf into its weights; check_update=True
 *   -DREPLICAS              one step of one rank may write another value; check_replicas_every=1
 *   -DSNAPSHOTS             with record(), of which every EVERY-th takes a snapshot, and rewind(); one
 *                           rank may have no memory once, and one rank may not restore once
 *   -DPROGRAMS              for drawing programs, no calls that stages refuse
 *   -DFAULT_...             a planted fault; each breaks an assertion, or makes ranks wait for ever
 */

/* What ends at the group's timeout: a message of ours that met a collective which is not ours. All
   messages have one length, so a message by a norm meets a message without one. */
#define IS_IN_TORCH(i) (at[i] == NEW_GROUP)
#define COMPARES(i) (at[i] == COMPARE)
#define OVERDUE ((ANY(IS_IN_TORCH)) && !(ANY(COMPARES)))
#include "ranks.pml"

/* Calls, each with the optimizers it is about: 1 the plain one, 2 the fused one, 3 both. */
mtype = { UNSCALE_, STEP, STEP_IF, STEP_BY_NORM, UPDATE, PROCESS_GROUP, REPORT, RECORD, REWIND };
mtype = { ALL_REDUCE, COMPARE, GATHER, SEE_REPLICAS, NEW_GROUP, FIND_ABSENT, BACKWARD, LATE_CHECK, CHOOSE };
/* What becomes of a step; of an optimizer of which no rank has a gradient, beside others or not. */
#define TAKEN 1
#define SKIPPED 2
#define SPIKE 3
#define IDLE 4
#define ABSENT_ERROR 5
#define REQUESTED 6
/* The names of calls, as the digest has them. */
#define NAME_STEP 0
#define NAME_NORM 1
#define NAME_UPDATE 2
#define NAME_REPORT 3
#define NAME_SKIP 4
#define NAME_RECORD 5
#define NAME_REWIND 6
/* Errors that wait for a message. */
#define NOTHING_CHECKED 1
#define OUT_OF_ORDER 2
#define NO_GRADIENTS 3
/* Weights of this rank have inf, which it found late; the text names the rank. */
#define BAD_WEIGHTS (4 + me)

#ifndef EVERY
#define EVERY 2
#endif

mtype program[CALLS];
byte over[CALLS];

/* State between calls: StepGuard, RankSync, OptimizerHistory and torch's states. */
typedef Own {
    byte iteration;
    byte calls;             /* a sum of 1 or 4 a step, modulo 16 */
    bit scales;             /* a message was exchanged over this group */
    bit clips_agree;
    bit arriving;           /* a reply that the host has not read, */
    bit reply_differs;
    bit reply_error;
    bit reply_asks;
    bit reply_nobody_looked;
    bit reply_raises;
    bit reply_blames;
    bit reply_late_check;   /* a check of replicas that did not stop the step */
    bit reply_replicas_differ;
    byte reply_drops;       /* the rewinds before the message, for the assertions */
    byte reply_about;       /* the optimizers of that reply, and which of them are idle */
    byte reply_idle;
    byte outcome[2];        /* and outcomes */
    byte idle;              /* a bit for each optimizer of which, as the host knows, no rank has a gradient */
    bit checked[2];         /* there is a flag */
    bit silent[2];          /* the step sent no message */
    bit overflowed;         /* all ranks know of inf or NaN in this iteration */
    byte unsent;            /* an error that waits for a message */
    byte failure;           /* 1 + the optimizer whose step raised */
    byte in_a_row[2];
    mtype stage[2];
    bit found_inf[2];
    byte requested;         /* optimizers for which the last message had a request to skip */
    byte bad_seen;          /* optimizers with inf in their weights on any rank, from the message */
    bit measured;           /* a step since the last message left inf in the weights */
    bit planned;            /* the ranks have gathered their sets of replicas */
    bit check_is_requested;
    byte last_iteration;    /* of the last message */
    byte touched;           /* optimizers of this iteration */
    byte records;
    byte next_record;
    bit has_snapshot;
    byte saved_iteration;
    byte saved_calls;
    byte saved_records;
};
Own own[RANKS];

/* The message: a digest, and flags (a bit for each optimizer) or a norm, which is fine (0), above the
   limit (1) or not finite (2); the reply. */
short alike[RANKS];
byte waiting[RANKS];        /* unsent and failure, also a part of the digest */
bit error[RANKS];
bit looked[RANKS];
byte lacks[RANKS];          /* a bit for each optimizer that has no gradient here */
byte words[RANKS];
bit sent_error[RANKS];
bit asks[RANKS];
bit any_asks;
bit requests[RANKS];
bit any_requests;
bit bad_update[RANKS];      /* the addend of check_update */
bit checks[RANKS];          /* the addend of a check of replicas: whether it is due, */
bit unplanned[RANKS];       /* and whether it makes all ranks gather */
bit unequal;                /* the reply stops this call */
bit raises;                 /* and all ranks raise */
bit gathers;                /* on the host: all ranks compare */
bit late_check;
bit replicas_differ;
byte all_bad_weights;
bit can_rewind;
byte counts;
byte total;
bit any_error;
bit all_alike;
bit all_rewind;
bit any_looked;
bit all_lack;
byte idle;

/* What only the assertions know. */
byte taken[RANKS];
byte messages;
byte by[2 * RANKS];         /* by which message a rank holds a flag */
bit parted[2 * RANKS];      /* and whether ranks differed there, or one could not look */
byte verdict_by[2];
byte verdict[2];
byte in_truth[2 * RANKS];   /* skips in a row */
bit had_error;
bit different;
bit owes[RANKS];            /* raised alone since the last message */
bit has_failed[RANKS];
bit any_failed;
byte bad_weights[RANKS];    /* optimizers whose weights have inf on this rank */
bit bad_steps[RANKS];       /* the last steps left inf, as a message has to say */
bit drifted[RANKS];
bit had_bad_update[RANKS];
bit had_drift;
bit had_shortage;
bit had_misfit;
bit stops;                  /* nothing may be stepped by this message */
bit blames;
bit blamed[RANKS];          /* an odd number of errors about weights or replicas */
byte rewinds[RANKS];        /* which succeeded; and all that began */
byte drops[RANKS];
bit refuses[RANKS];         /* has an error in the order of calls that no message has sent yet */

#define IS(o, what) (own[me].stage[o] == what)
#define HAS_ERROR(i) (error[i])
#define HAS_MORE(i) (asks[i])
#define REWINDS(i) ((alike[i] & 7) == NAME_REWIND)
#define REQUESTS_SKIP(i) (requests[i])
#define HAS_BAD_UPDATE(i) (bad_update[i])
#define HAS_BAD_STEP(i) (bad_steps[i])
#define HAS_BAD_WEIGHTS(i) (bad_weights[i])
#define CHECKS(i) (checks[i])
#define IS_PLANNED(i) (checks[i] && !unplanned[i])
#define IS_UNPLANNED(i) (unplanned[i])
#define HAS_DRIFTED(i) (drifted[i])
#define FOUND_WEIGHTS_LATE(i) ((waiting[i] & 7) > 3)
#define IS_BLAMED_ALIKE(i) (blamed[i] == blamed[0])
#define REWOUND_ALIKE(i) (rewinds[i] == rewinds[0])
#define HAS_SNAPSHOT(i) (own[i].has_snapshot && own[i].saved_records == own[0].saved_records)
#define RECORDED_ALIKE(i) (own[i].records == own[0].records)
#define HAS_LOOKED(i) (looked[i])
#define LACKS_SOME(i) (lacks[i])
#define REFUSES(i) (refuses[i] && IS_GONE(i))
#define IS_ALIKE(i) (alike[i] == alike[0] && waiting[i] == waiting[0])
#define OWES_THE_SAME(i) (owes[i] == owes[0])
#define SAME_STEPS_TAKEN(i) (taken[i] == taken[0])

#if RANKS == 2
#define CLEAR(array) array[0] = 0; array[1] = 0
#else
#define CLEAR(array) array[0] = 0; array[1] = 0; array[2] = 0
#endif

/* The last to arrive does what the collective does. */
inline arrived(collective) {
    if
    :: collective == ALL_REDUCE ->
        any_error = ANY(HAS_ERROR);
        all_alike = ALL(IS_ALIKE);
        all_rewind = ALL(REWINDS);
        any_asks = ANY(HAS_MORE);
        any_looked = ANY(HAS_LOOKED);
        all_lack = ALL(LACKS_SOME);
        any_requests = ANY(REQUESTS_SKIP);
        messages++;
        replicas_differ = ALL(CHECKS) && ANY(HAS_DRIFTED);
        late_check = ANY(IS_UNPLANNED);
        unequal = any_error || !all_alike;
        stops = ANY(HAS_BAD_STEP);
        if
        :: ON_HOST -> stops = stops || replicas_differ; raises = unequal || stops;
            unequal = unequal || ANY(HAS_BAD_UPDATE) || replicas_differ
        :: else ->
            stops = stops || (replicas_differ && ANY(IS_PLANNED));
            raises = unequal || ANY(HAS_BAD_UPDATE) || (replicas_differ && ANY(IS_PLANNED));
#ifndef FAULT_UPDATE_DOES_NOT_STOP
            unequal = unequal || ANY(HAS_BAD_UPDATE);
#endif
#ifndef FAULT_CHECK_DOES_NOT_STOP
            unequal = unequal || (ANY(IS_PLANNED) && (replicas_differ || late_check || !(ALL(CHECKS))));
#endif
            skip
        fi;
        gathers = unequal || any_requests || any_asks || late_check || (ANY(CHECKS) && !(ALL(CHECKS)));
        blames = !any_error && (ANY(HAS_BAD_UPDATE) || replicas_differ || ANY(FOUND_WEIGHTS_LATE));
        if
        :: all_alike && !any_error ->
            if
            :: all_rewind -> CLEAR(taken); CLEAR(owes)
            :: else
            fi;
            /* Ranks that agree have raised the same errors about weights and replicas, */
            assert(all_rewind || ALL(IS_BLAMED_ALIKE));
            /* and have gone back as often. */
            assert(ALL(REWOUND_ALIKE));
            /* They have taken the same steps, */
            assert(ALL(SAME_STEPS_TAKEN));
            /* and what one of them raised alone, all did. */
            assert(ALL(OWES_THE_SAME));
            CLEAR(taken)
        :: else
        fi;
        CLEAR(owes);
        idle = 3;
        counts = 0;
        total = 0;
        i = 0;
        do
        :: i < RANKS ->
            counts = counts | words[i];
            idle = idle & lacks[i];
            total = (words[i] > total -> words[i] : total);
            sent_error[i] = error[i];
            i++
        :: else -> break
        od;
        CLEAR(alike); CLEAR(error); CLEAR(words); CLEAR(asks);
        CLEAR(waiting); CLEAR(looked); CLEAR(lacks);
        CLEAR(requests); CLEAR(bad_update); CLEAR(bad_steps); CLEAR(checks); CLEAR(unplanned)
    :: collective == GATHER ->
        all_bad_weights = 0;
        i = 0;
        do
        :: i < RANKS -> all_bad_weights = all_bad_weights | bad_weights[i]; i++
        :: else -> break
        od
    :: collective == CHOOSE -> can_rewind = ALL(HAS_SNAPSHOT) && ALL(RECORDED_ALIKE)
    /* Counted anew: steps that differ since the last message are not seen over a new group. */
    :: collective == NEW_GROUP ->
        CLEAR(owes);
        if :: different || any_failed -> CLEAR(taken) :: else fi
    :: else
    fi
}

/* -- Ranks ------------------------------------------------------------------------------------- */

inline compare() {
#ifdef FAULT_WHO_HAS_BAD_WEIGHTS_RAISES_ALONE
    late = bad_weights[me];
#endif
    reach(COMPARE);
    if
#ifdef FAULT_WHO_HAS_BAD_WEIGHTS_RAISES_ALONE
    :: unequal && all_alike && !any_error && !late -> skip
#endif
#ifdef FAULT_WHO_DRIFTED_RAISES_ALONE
    :: unequal && all_alike && !any_error && !drifted[me] -> skip
#endif
    :: else ->
        if
        :: unequal -> blame = blames; goto raised
        :: else -> own[me].planned = own[me].planned || late_check
        fi
    fi
}

/* Count a step that the host knows of. */
inline count(o, what) {
#ifdef LIMIT
    if
    :: what == TAKEN -> own[me].in_a_row[o] = 0
    :: what == SKIPPED -> own[me].in_a_row[o]++
#ifdef FAULT_SPIKES_COUNT
    :: what == SPIKE -> own[me].in_a_row[o]++
#endif
    :: else
    fi;
    if
    :: own[me].in_a_row[o] == LIMIT ->
        own[me].in_a_row[o] = 0;
        assert(in_truth[2 * me + o] >= LIMIT);
        in_truth[2 * me + o] = 0;
        goto limit
    :: else
    fi
#else
    skip
#endif
}

/* A skip because of the weights: on the host all ranks have sent theirs, on a device each looks at its
   own, and the next message has its error. */
inline check_weights_of_skip(o, what) {
#ifdef UPDATES
    if
    :: what == SKIPPED && ON_HOST && ((own[me].bad_seen >> o) & 1) -> blame = 1; goto raised_late
    :: what == SKIPPED && !ON_HOST && ((bad_weights[me] >> o) & 1) && own[me].scales ->
#ifdef FAULT_BAD_WEIGHTS_ARE_RAISED_ALONE
        blame = 1;
        goto raised_late
#else
        own[me].unsent = BAD_WEIGHTS
#endif
    :: else
    fi
#else
    skip
#endif
}

/* Read what is on its way, and raise what it demands. */
inline settle() {
    if
    :: own[me].arriving ->
        own[me].arriving = 0;
        /* It is no answer from before a rewind. */
        assert(own[me].reply_drops == drops[me]);
        if
        /* Where no rank had looked, each has raised its own error in that call. */
        :: own[me].reply_differs || own[me].reply_error ->
            late = own[me].reply_nobody_looked;
            reach(COMPARE);
            if
#ifdef FAULT_WHO_HAS_BAD_WEIGHTS_RAISES_ALONE
            :: own[me].reply_blames && !bad_weights[me] -> skip
#endif
            :: !late && own[me].reply_raises -> blame = own[me].reply_blames; goto raised
            :: else -> skip
            fi
        :: else
        fi;
        if
        :: own[me].reply_late_check ->
            reach(LATE_CHECK);
            own[me].planned = 1;
            if :: own[me].reply_replicas_differ -> blame = 1; goto raised :: else fi
        :: else
        fi;
        d_step {
            late = 0;
            own[me].clips_agree = own[me].clips_agree && !own[me].reply_asks;
            own[me].idle = (own[me].idle & ~own[me].reply_about) | own[me].reply_idle
        }
    :: else
    fi;
    if
    :: own[me].outcome[FUSED] ->
        noted = own[me].outcome[FUSED];
        own[me].outcome[FUSED] = 0;
        if
        :: noted == ABSENT_ERROR -> goto absent
        :: else
        fi;
        check_weights_of_skip(FUSED, noted);
        count(FUSED, noted)
    :: else
    fi
}

/* Send what this rank found. On a device the host goes on: what differs is NaN, or sets all flags. */
inline exchange(name) {
    closing = about;
    settle();
    d_step {
        alike[me] = name + 8 * about + 32 * own[me].iteration;
#ifndef FAULT_DIGEST_WITHOUT_LIMIT
        alike[me] = alike[me] + 512 * value;
#endif
#ifndef FAULT_DIGEST_WITHOUT_STEPS
        alike[me] = alike[me] + 1024 * own[me].calls;
#endif
#ifndef FAULT_UNSENT_IS_NOT_SENT
        waiting[me] = own[me].unsent;
#endif
#ifndef FAULT_FAILURE_IS_NOT_SENT
        waiting[me] = waiting[me] + 8 * own[me].failure;
#endif
        own[me].unsent = 0;
        requests[me] = request;
        bad_steps[me] = own[me].measured;
#ifndef FAULT_UPDATE_IS_NOT_SENT
        bad_update[me] = own[me].measured;
#endif
        own[me].measured = 0;
        checks[me] = own[me].check_is_requested;
#ifdef REPLICAS
        if
        :: own[me].iteration > 0 && own[me].iteration != own[me].last_iteration -> checks[me] = 1
        :: else
        fi;
        own[me].last_iteration = own[me].iteration;
#endif
        own[me].check_is_requested = 0;
        unplanned[me] = checks[me] && !own[me].planned
    };
#ifdef FAULT_OWN_NORM
    mine = words[me];
#endif
#ifdef FAULT_SKIPS_COUNT_BY_THEIR_OWN
    mine = words[me];
#endif
#if defined(FAULT_OWN_ABSENCE) || defined(FAULT_WHO_LACKS_SOME_FINDS_ALONE)
    mine = lacks[me];
#endif
    reach(ALL_REDUCE);
    refuses[me] = 0;
    if
    :: !ON_HOST && own[me].scales ->
        d_step {
            own[me].arriving = 1;
            own[me].reply_differs = unequal;
            own[me].reply_raises = raises;
            own[me].reply_blames = blames;
            own[me].reply_late_check = late_check;
            own[me].reply_replicas_differ = replicas_differ;
            own[me].reply_drops = drops[me];
            own[me].reply_error = sent_error[me];
            own[me].reply_nobody_looked = !any_looked;
            own[me].reply_about = about;
            own[me].reply_idle = about & idle;
#ifdef FAULT_WHO_ASKS_COMPARES_ALONE
            own[me].reply_asks = asked
#else
            own[me].reply_asks = any_asks
#endif
        }
    :: else ->
        if
#ifdef FAULT_WHO_REQUESTS_COMPARES_ALONE
        :: any_requests && !request && !unequal -> skip
#endif
#ifdef FAULT_WHO_PLANS_GATHERS_ALONE
        :: late_check && me != 0 && !unequal -> own[me].planned = 1
#endif
        :: gathers && (unequal || !any_asks) -> compare()
#ifdef FAULT_WHO_ASKS_COMPARES_ALONE
        :: else -> own[me].clips_agree = own[me].clips_agree && !asked
#else
        :: !unequal && any_asks -> compare(); own[me].clips_agree = 0
        :: else
#endif
        fi;
#ifdef ABSENT
        /* _find_absent */
        if
#ifdef FAULT_WHO_LACKS_SOME_FINDS_ALONE
        :: ON_HOST && mine && about == 3 -> reach(FIND_ABSENT)
#else
        :: ON_HOST && all_lack && about == 3 -> reach(FIND_ABSENT)
#endif
        :: else
        fi;
#ifdef FAULT_OWN_ABSENCE
        own[me].idle = (own[me].idle & ~about) | (about & mine)
#else
        own[me].idle = (own[me].idle & ~about) | (about & idle)
#endif
#endif
    fi;
    own[me].scales = 1;
#ifdef FAULT_OWN_REQUEST
    requested = request;
#else
    requested = any_requests && !unequal;
#endif
    own[me].requested = (own[me].requested & ~about) | (requested -> about : 0);
    request = 0
}

/* On the host an optimizer that is idle has no flag, as torch leaves none. */
inline hold(o, flag) {
    own[me].checked[o] = !(ON_HOST && ((own[me].idle >> o) & 1));
    own[me].found_inf[o] = flag && own[me].checked[o];
    by[2 * me + o] = messages;
    parted[2 * me + o] = any_error || !all_alike || stops
}

/* All ranks agree on the flags. */
inline agree() {
    exchange(NAME_STEP);
    d_step {
        noted = (unequal -> 3 : counts);
        if :: about & 1 -> hold(0, noted & 1) :: else fi;
        if :: about & 2 -> hold(1, (noted >> 1) & 1) :: else fi
    };
    if
    :: noted && ON_HOST ->
        own[me].overflowed = 1;
        reach(GATHER);
        own[me].bad_seen = (own[me].bad_seen & ~about) | (about & all_bad_weights)
    :: else
    fi;
    closing = 0
}

/* The requests to skip a step whose flags are known, in a message of their own. */
inline agree_on_request() {
    exchange(NAME_SKIP);
    d_step {
#ifdef FAULT_REQUESTS_THAT_DIFFER_SET_NO_FLAG
        if :: about & 1 -> by[2 * me] = messages; parted[2 * me] = unequal :: else fi;
        if :: about & 2 -> by[2 * me + 1] = messages; parted[2 * me + 1] = unequal :: else fi;
#else
        if :: about & 1 -> hold(0, own[me].found_inf[0] || unequal) :: else fi;
        if :: about & 2 -> hold(1, own[me].found_inf[1] || unequal) :: else fi;
#endif
        skip
    };
    closing = 0
}

/* All ranks agree on a norm over all that the call is about: skip it, or step it. */
inline agree_on_norm() {
    exchange(NAME_NORM);
    d_step {
#ifdef FAULT_OWN_NORM
        norm = mine;
#else
        norm = total;
#endif
#ifndef FAULT_NO_NAN_WHERE_RANKS_DIFFER
        if
        :: unequal -> norm = 2
        :: else
        fi;
#endif

        if
        :: norm == 1 && value -> norm = 0                /* no limit */
        :: else
        fi
    };
    if
    :: !own[me].clips_agree ->
#ifndef FAULT_REPLICAS_ARE_SEEN_BEFORE_THE_REPLY
        settle();
#endif
        reach(SEE_REPLICAS);
        own[me].clips_agree = (norm != 2)
    :: else
    fi;
    if
    :: norm == 2 && ON_HOST ->
        own[me].overflowed = 1;
        reach(GATHER);
        own[me].bad_seen = (own[me].bad_seen & ~about) | (about & all_bad_weights)
    :: else
    fi;
    closing = 0;
    d_step {
        /* What was found before stays found. */
#ifdef FAULT_FOUND_BEFORE_IS_NOT_SENT
        norm = (before -> 2 : norm);
#endif
        assert(!before || norm == 2);
        if :: about & 1 -> hold(0, norm == 2) :: else fi;
#ifdef FAULT_NORM_SKIPS_ONE
        if :: about & 2 -> hold(1, norm == 2 && about != 3) :: else fi;
#else
        if :: about & 2 -> hold(1, norm == 2) :: else fi;
#endif
        /* One norm over both: none is stepped beside one that is skipped. */
        assert(about != 3 || own[me].found_inf[0] == own[me].found_inf[1] ||
               !own[me].checked[0] || !own[me].checked[1])
    }
}

/* A call that stages refuse: its error travels with the message that the others wait for. On a device
   this rank raises it at once, and the others at their next call. */
inline refuse(name) {
    d_step { words[me] = 0; error[me] = 1; looked[me] = 0; lacks[me] = 0 };
#ifdef FAULT_ORDER_IS_RAISED_ALONE
    d_step { error[me] = 0; refuses[me] = 1 };
    goto alone;
#endif
    refuses[me] = 1;
    exchange(name);
    d_step {
        /* On a device what is not stepped yet skips. */
        if :: (about & 1) && !IS(0, STEPPED) -> own[me].stage[0] = UNSCALED; hold(0, 1) :: else fi;
        if :: (about & 2) && !IS(1, STEPPED) -> own[me].stage[1] = UNSCALED; hold(1, 1) :: else fi
    };
    goto alone
}

/* An error of a call that sends no message: the next message has it. Before the first message over a
   group there is nothing that it could wait for. */
inline send_later(what) {
    if
    :: own[me].scales -> d_step { own[me].unsent = what; owes[me] = 1 }
    :: else
    fi;
    goto alone
}

/* -- StepGuard --------------------------------------------------------------------------------- */

/* Look at gradients, of which there are so many kinds; one look may raise. Flags are a bit for each
   optimizer. */
inline look(kinds) {
    atomic {
        words[me] = 0;
        error[me] = 0;
        looked[me] = 1;
        own[me].idle = own[me].idle & ~about;
        own[me].reply_about = own[me].reply_about & ~about;
        own[me].reply_idle = own[me].reply_idle & ~about;
        if
        :: words[me] = 0
        :: words[me] = 1
        :: kinds > 2 -> words[me] = 2
        :: kinds > 3 -> words[me] = 3
        fi;
        words[me] = (kinds == 2 && about == 2 -> 2 * words[me] : words[me]);
#ifdef ABSENT
        if
        :: lacks[me] = 0
        :: lacks[me] = about
        :: about == 3 -> lacks[me] = 1
        :: about == 3 -> lacks[me] = 2
        fi;
        words[me] = (kinds == 3 -> (lacks[me] == about -> 0 : words[me]) : words[me] & ~lacks[me]);
#endif
#ifdef ERROR
        if
        :: !had_error && FITS(position[me] > 3) -> had_error = 1; error[me] = 1; words[me] = 0; lacks[me] = 0
        :: skip
        fi;
#endif
        printf("%d found %d error %d lacks %d\n", me, words[me], error[me], lacks[me])
    }
}

inline close() {
    d_step {
        if
        :: closing & any_looked & !IS(0, STEPPED) ->
            own[me].stage[0] = STEPPED; own[me].found_inf[0] = 1; own[me].checked[0] = 1
        :: else
        fi;
        if
        :: (closing >> 1) & any_looked & !IS(1, STEPPED) ->
            own[me].stage[1] = STEPPED; own[me].found_inf[1] = 1; own[me].checked[1] = 1
        :: else
        fi;
        closing = 0
    }
}

inline set_stage(mask, to) {
    if :: mask & 1 -> own[me].stage[0] = to :: else fi;
    if :: mask & 2 -> own[me].stage[1] = to :: else fi
}

/* What no kernel does as it steps. */
inline unscale() {
    if :: about & 1 -> own[me].stage[0] = UNSCALED :: else fi
}

/* What a step leaves in the weights of this rank; check_update measures it. */
inline write_weights(o) {
#ifdef UPDATES
    if
    :: noted == TAKEN && !had_bad_update[me] ->
        had_bad_update[me] = 1;
        bad_weights[me] = bad_weights[me] | (1 << o);
        printf("%d writes %d inf\n", me, o)
    :: skip
    fi;
    if
    :: (noted == TAKEN || (!ON_HOST && o == FUSED && noted != IDLE)) && ((bad_weights[me] >> o) & 1) ->
        own[me].measured = 1
    :: else
    fi;
#endif
#ifdef REPLICAS
    if
    :: noted == TAKEN && !had_drift ->
        had_drift = 1;
        drifted[me] = 1;
        printf("%d writes %d drift\n", me, o)
    :: skip
    fi;
#endif
    skip
}

/* Step by the flag, or skip, or do nothing for an optimizer that is idle beside others. */
inline apply(o, spikes) {
    if
    :: o == PLAIN && !(ON_HOST && ((own[me].idle >> o) & 1)) -> settle()    /* settle_with_others */
    :: else
    fi;
    noted = ((own[me].idle >> o) & 1 -> IDLE :
             (own[me].found_inf[o] -> SKIPPED :
              ((own[me].requested >> o) & 1 -> REQUESTED : (spikes -> SPIKE : TAKEN))));
    if
    :: !ON_HOST || noted != IDLE -> d_step {
        own[me].calls = (own[me].calls + (o == PLAIN -> 1 : 4)) % 16 }
    :: else
    fi;
    if
    :: !ON_HOST && noted == IDLE && (left & ~own[me].idle) == 0 -> goto absent
    :: else
    fi;
#ifdef FAILS
    if
    :: noted == TAKEN && !has_failed[me] ->
        has_failed[me] = 1;
        any_failed = 1;
        own[me].failure = 1 + o;
        /* It is not tried again: update() comes first. */
        own[me].stage[o] = STEPPED;
        printf("%d fails %d\n", me, o);
        goto alone
    :: skip
    fi;
#endif
    d_step {
        /* What ranks differed in, or one could not look at, steps nothing. */
        assert(noted == IDLE || own[me].found_inf[o] || !parted[2 * me + o]);
        if
        :: verdict_by[o] == by[2 * me + o] ->
            /* No rank steps where another skips. */
            assert(verdict[o] == noted || by[2 * me + o] == 0)
        :: else -> verdict_by[o] = by[2 * me + o]; verdict[o] = noted
        fi;
        if
        :: noted == TAKEN ->
            in_truth[2 * me + o] = 0;
            taken[me] = (o == PLAIN -> (taken[me] & 12) | ((taken[me] + 1) & 3) : (taken[me] + 4) & 15)
        :: noted == SKIPPED -> in_truth[2 * me + o]++
        :: else
        fi;
        own[me].stage[o] = STEPPED
    };
    write_weights(o);
    if
    :: noted != IDLE -> printf("%d stepped %d taken %d scale 0\n", me, o, noted == TAKEN)
    :: else
    fi;
#ifdef FAULT_SKIPS_COUNT_BY_THEIR_OWN
    noted = (noted == SKIPPED && !mine -> TAKEN : noted);
#endif
    if
    :: !ON_HOST && o == FUSED ->
#ifdef ABSENT
        /* Whether it is idle, the host learns from the reply. */
        if
        :: own[me].arriving && (own[me].reply_idle & 2) && left == 2 -> noted = ABSENT_ERROR
        :: own[me].arriving && (own[me].reply_idle & 2) && left == 3 -> noted = IDLE
        :: else
        fi;
#endif
#if defined(LIMIT) || defined(ABSENT) || defined(UPDATES)
        own[me].outcome[o] = noted
#else
        skip
#endif
    :: else -> check_weights_of_skip(o, noted); count(o, noted)
    fi
}

inline reset(o) {
    own[me].stage[o] = READY;
    own[me].found_inf[o] = 0;
    own[me].checked[o] = 0;
    own[me].silent[o] = 0;
    by[2 * me + o] = 0;
    parted[2 * me + o] = 0
}

/* Forget the iteration under way, with counters, errors and late reads. */
inline drop_iteration() {
    reset(0);
    reset(1);
    own[me].touched = 0;
    own[me].requested = 0;
    own[me].idle = 0;
    own[me].bad_seen = 0;
    own[me].check_is_requested = 0;
    own[me].last_iteration = 0;
    own[me].overflowed = 0;
    own[me].calls = 0;
#ifndef FAULT_ITERATION_KEPT_AT_REWIND
    own[me].iteration = 0;
#endif
#ifndef FAULT_UNSENT_KEPT_AT_REWIND
    own[me].unsent = 0;
#endif
#ifndef FAULT_FAILURE_KEPT_AT_REWIND
    own[me].failure = 0;
#endif
#ifndef FAULT_MEASUREMENT_KEPT_AT_REWIND
    own[me].measured = 0;
#endif
#ifndef FAULT_REPLY_KEPT_AT_REWIND
    own[me].arriving = 0;
#endif
    own[me].outcome[FUSED] = 0
}

/* Write a snapshot back. */
inline restore() {
    own[me].iteration = own[me].saved_iteration;
    own[me].calls = own[me].saved_calls;
    bad_weights[me] = 0;
    drifted[me] = 0
}

/* A step of optimizers of which no rank has a gradient, as far as the host knows. Where it sent no
   message, the others may be elsewhere. */
inline refuse_absent() {
#ifdef ABSENT
    if
    :: left && (left & ~own[me].idle) == 0 ->
        set_stage(about, READY);
#ifndef FAULT_ABSENT_IS_RAISED_ALONE
        if
        :: call == STEP && about == 0 -> send_later(NO_GRADIENTS)
        :: else
        fi;
#else
        owes[me] = (call == STEP && about == 0);
#endif
        goto absent
    :: else
    fi
#else
    skip
#endif
}

/* Make sure that every rank makes this call. */
inline announce(name) {
    d_step { about = 0; words[me] = 0; error[me] = 0; looked[me] = 1; lacks[me] = 0 };
    exchange(name)
}

/* -- one rank ---------------------------------------------------------------------------------- */

inline choose(mine) {
    if
    :: program[mine] == 0 ->
        if
        :: FITS(IS(0, READY)) -> program[mine] = UNSCALE_; over[mine] = 1
        :: FITS(IS(1, READY)) -> program[mine] = UNSCALE_; over[mine] = 2
        :: FITS(!IS(0, STEPPED)) -> program[mine] = STEP; over[mine] = 1
        :: FITS(!IS(1, STEPPED)) -> program[mine] = STEP; over[mine] = 2
        /* step_all */
        :: FITS(!IS(0, STEPPED) && !IS(1, STEPPED)) -> program[mine] = STEP; over[mine] = 3
        :: FITS(!IS(0, STEPPED)) -> program[mine] = STEP_BY_NORM; over[mine] = 1
        :: FITS(!IS(1, STEPPED)) -> program[mine] = STEP_BY_NORM; over[mine] = 2
        :: FITS(!IS(0, STEPPED) && !IS(1, STEPPED)) -> program[mine] = STEP_BY_NORM; over[mine] = 3
        :: FITS(own[me].checked[0] || own[me].checked[1]) -> program[mine] = UPDATE
#ifdef REQUESTS
        :: FITS(!IS(0, STEPPED)) -> program[mine] = STEP_IF; over[mine] = 1
        :: FITS(!IS(1, STEPPED)) -> program[mine] = STEP_IF; over[mine] = 2
        :: FITS(!IS(0, STEPPED) && !IS(1, STEPPED)) -> program[mine] = STEP_IF; over[mine] = 3
#endif
#ifdef SNAPSHOTS
        :: FITS(!own[me].touched) -> program[mine] = RECORD
        :: program[mine] = REWIND
#endif
#ifdef GROUPS
        :: program[mine] = PROCESS_GROUP
#endif
        fi
    :: else
    fi;
    call = program[mine];
    about = over[mine];
    value = 0
}

/* One rank does something else, once. */
inline differ() {
    if
#ifdef REPORTS
    :: me == 0 && !different && call == UPDATE && ON_HOST && own[me].overflowed ->
        if
        :: skip
        :: different = 1; call = REPORT                                  /* reports alone */
        fi
#else
    :: me == 0 && !different ->
        if
        :: skip
        :: different = 1;
            if
            :: call = 0                                                  /* leaves it out */
            :: about == 1 || about == 2 -> about = 3 - about             /* another optimizer */
            :: call == STEP && about < 3 -> call = UNSCALE_              /* unscales alone */
            :: call == STEP -> call = STEP_BY_NORM                       /* clips alone */
#ifdef REQUESTS
            :: call == STEP -> call = STEP_IF                            /* passes skip_if alone */
            :: call == STEP_IF -> call = STEP
#endif
            :: call == STEP_BY_NORM -> value = 1                         /* by another limit */
            fi
        fi
#endif
    :: else
    fi
}

proctype Rank(byte me) {
    byte about, closing, noted, norm, value, i, left;
    byte ready;
    bit before, asked, late, request, requested, blame, misfit, restoring, draining;
#if defined(FAULT_OWN_NORM) || defined(FAULT_SKIPS_COUNT_BY_THEIR_OWN) || \
    defined(FAULT_OWN_ABSENCE) || defined(FAULT_WHO_LACKS_SOME_FINDS_ALONE)
    byte mine;
#endif
    mtype call, where;

    /* What a rank does by itself is one step: others see of it what it sends. */
    atomic {
    skip;
next:
        closing = 0; noted = 0; norm = 0; before = 0; call = 0; about = 0; value = 0; left = 0; where = 0; asked = 0; late = 0;
        ready = 0; request = 0; requested = 0; blame = 0; misfit = 0; restoring = 0;
        if
        :: position[me] == CALLS -> goto ended
        :: else
        fi;
#ifdef ASKS
        if
        :: settle()                                 /* step_counts */
        :: skip
        fi;
#endif
        choose(position[me]);
        position[me]++;
        if
        :: ALL(IS_PAST) -> program[position[me] - 1] = 0; over[position[me] - 1] = 0
        :: else
        fi;
#if defined(DIFFERS) || defined(REPORTS)
        differ();
#endif
        if
        :: call == 0 -> goto next
        :: else
        fi;
        printf("%d %e %d value %d\n", me, call, about, value);
        own[me].touched = own[me].touched | about;
#ifdef REQUESTS
        if
        :: (call == STEP_IF || call == STEP_BY_NORM) ->
            if
            :: request = 1; printf("%d requests\n", me)
            :: skip
            fi
        :: else
        fi;
#endif
    if
    :: call == UNSCALE_ ->
        if
        :: ((about & 1) && !IS(0, READY)) || ((about & 2) && !IS(1, READY)) -> refuse(NAME_STEP)
        :: else
        fi;
        set_stage(about, UNSCALED);
        look((about == 3 -> 4 : 2));
        agree()

    :: call == STEP || call == STEP_IF ->
        left = about;
        if
        :: ((about & 1) && IS(0, STEPPED)) || ((about & 2) && IS(1, STEPPED)) ->
            request = 0;
            if
            :: call == STEP_IF &&
               (!(about & 1) || own[me].silent[0] || IS(0, UNSCALED)) &&
               (!(about & 2) || own[me].silent[1] || IS(1, UNSCALED)) -> refuse(NAME_SKIP)
            :: call == STEP &&
               (!(about & 1) || own[me].silent[0] || IS(0, UNSCALED)) &&
               (!(about & 2) || own[me].silent[1] || IS(1, UNSCALED)) -> send_later(OUT_OF_ORDER)
            :: else -> refuse(NAME_STEP)
            fi
        :: else
        fi;
        if :: !IS(0, READY) -> about = about & 2 :: else fi;
        if :: !IS(1, READY) -> about = about & 1 :: else fi;
        if :: left & 1 -> own[me].silent[0] = !about && call == STEP :: else fi;
        if :: left & 2 -> own[me].silent[1] = !about && call == STEP :: else fi;
#ifdef FAULT_REQUEST_BESIDE_UNSCALE_IS_FORGOTTEN
        own[me].requested = own[me].requested & ~left;
#endif
        if
        :: !about && call == STEP_IF ->
            about = left;
            d_step { words[me] = 0; error[me] = 0; looked[me] = 1; lacks[me] = 0 };
            agree_on_request();
            about = 0
        :: about ->
            unscale();
            look((about == 3 -> 4 : 2));
            agree();
            own[me].requested = own[me].requested | (requested -> left : 0)
        :: else
        fi;
        refuse_absent();
        if :: left & 1 -> apply(PLAIN, 0) :: else fi;
        if :: left & 2 -> apply(FUSED, 0) :: else fi

    :: call == STEP_BY_NORM ->
        left = about;
        if
        :: ((about & 1) && IS(0, STEPPED)) || ((about & 2) && IS(1, STEPPED)) -> refuse(NAME_NORM)
        :: else
        fi;
        if :: about & 1 -> own[me].silent[0] = 0 :: else fi;
        if :: about & 2 -> own[me].silent[1] = 0 :: else fi;
        ready = (IS(0, READY) -> about & 1 : 0);
        before = (((about & 1) && IS(0, UNSCALED) && own[me].found_inf[0]) ||
                  ((about & 2) && IS(1, UNSCALED) && own[me].found_inf[1]));
        unscale();
        look(3);
#if !defined(FAULT_FOUND_BEFORE_IS_NOT_SENT) && !defined(FAULT_FOUND_BEFORE_IS_FORGOTTEN)
        words[me] = (before && !error[me] -> 2 : words[me]);
#endif
#ifdef GROWS
        if
        :: asked = 1
        :: skip
        fi;
        asks[me] = asked;
#endif
        agree_on_norm();
        about = ready;
        refuse_absent();
        about = left;
        if :: about & 1 -> apply(PLAIN, norm == 1) :: else fi;
        if :: about & 2 -> apply(FUSED, norm == 1) :: else fi

    :: call == UPDATE ->
        if
        /* Where one rank alone may have called nonfinite_report(), as all know. */
#ifndef FAULT_UPDATE_SENDS_NOTHING
        :: own[me].overflowed ->
#ifdef FAULT_OVERFLOWED_IS_FORGOTTEN_FIRST
            own[me].overflowed = 0;
#endif
            announce(NAME_UPDATE);
            own[me].overflowed = 0
#endif
        :: else
        fi;
        if
        :: !own[me].checked[0] && !own[me].checked[1] -> send_later(NOTHING_CHECKED)
        :: else -> d_step { reset(0); reset(1); own[me].touched = 0; own[me].requested = 0; own[me].iteration++ }
        fi;
#ifdef REPORTS
        reach(BACKWARD)
#endif

    :: call == REPORT ->
        announce(NAME_REPORT);
        reach(GATHER)

    :: call == RECORD ->
        own[me].records++;
        if
        :: own[me].records < own[me].next_record ->
            if :: own[me].touched -> send_later(OUT_OF_ORDER) :: else fi
        :: else ->
            if
            :: own[me].touched -> misfit = 1
            :: else -> restoring = 1; settle()
            fi;
not_settled:
            restoring = 0;
            atomic {
                words[me] = (bad_weights[me] && !misfit -> 1 : 0);
                if
                :: !misfit && !had_shortage && FITS(0) ->
                    had_shortage = 1;
                    words[me] = words[me] | 2
                :: skip
                fi;
#ifdef FAULT_WHO_HAS_BAD_WEIGHTS_RECORDS_NOTHING
                if :: words[me] & 1 -> words[me] = 0; blame = 1; goto raised :: else fi;
#endif
                error[me] = misfit; looked[me] = 1; lacks[me] = 0; about = 0;
                own[me].check_is_requested = !(words[me] & 1);
                noted = words[me]
            };
            misfit = 0;
            exchange(NAME_RECORD);
            if
            :: ON_HOST -> if :: counts -> reach(GATHER) :: else fi
            :: else -> misfit = 0; noted = counts; settle()
            fi;
            noted = counts;
            own[me].overflowed = 0;
            if
            :: noted -> reach(GATHER)
            :: else
            fi;
            if :: noted & 1 -> blame = 1; goto raised :: else fi;
            own[me].next_record = own[me].records + EVERY;
            if
            :: !noted -> d_step {
                /* A snapshot never has the fault for which ranks go back. */
                assert(!(ANY(HAS_BAD_WEIGHTS)));
                own[me].has_snapshot = 1;
                own[me].saved_iteration = own[me].iteration;
                own[me].saved_calls = own[me].calls;
                own[me].saved_records = own[me].records }
            :: else
            fi
        fi

    :: call == REWIND ->
        /* Another rank may be in the comparison that a late reply demands. */
#if !defined(FAULT_REPLY_KEPT_AT_REWIND) && !defined(FAULT_REPLY_DROPPED_AT_REWIND)
        draining = 1;
        settle();
drained:
        draining = 0;
#endif
        d_step {
            blame = 0;
            drops[me]++;
            drop_iteration()
        };
        announce(NAME_REWIND);
        settle();
        reach(CHOOSE);
        if :: !can_rewind -> goto unrecoverable :: else fi;
        restoring = 1;
        if
        :: !had_misfit && FITS(0) -> had_misfit = 1; misfit = 1
        :: restore()
        fi;
#ifdef FAULT_WHO_CANNOT_RESTORE_RAISES_ALONE
        if :: misfit -> goto raised :: else -> goto rewound fi;
#endif
        d_step { about = 0; words[me] = 0; error[me] = misfit; looked[me] = 1; lacks[me] = 0 };
        exchange(NAME_REWIND);
        settle();
#ifdef FAULT_WHO_CANNOT_RESTORE_RAISES_ALONE
rewound:
#endif
        own[me].records = own[me].saved_records;
        own[me].next_record = own[me].saved_records + EVERY;
        /* The snapshot was taken after these. */
        blamed[me] = 0;
        rewinds[me]++

    :: call == PROCESS_GROUP ->
        settle();
        reach(NEW_GROUP);
        d_step {
            own[me].scales = 0;
            own[me].iteration = 0;
            own[me].calls = 0;
            own[me].overflowed = 0;
            own[me].unsent = 0;
            own[me].failure = 0;
#ifdef FAULT_CLIPS_AGREE_KEPT_IN_A_NEW_GROUP
            own[me].clips_agree = own[me].clips_agree && me != 0
#else
            own[me].clips_agree = 0
#endif
        }
    fi;
    goto next;

lost:
    printf("%d lost\n", me);
    /* A rank may lose its peers only where one of them did something else, or raised as it stepped;
       or if it alone reads a late reply after the last call of the others; */
    assert(different || any_failed || (call == 0 && (ANY(HAS_ENDED))));
    /* on the host not for an error in the order of calls. */
    assert(!ON_HOST || where != ALL_REDUCE || !(ANY(REFUSES)));
    refuses[me] = 0;
    at[me] = 0;
    status[me] = RAISED;
    goto end;

alone:
    printf("%d alone\n", me);
#ifdef CATCHES
    goto next;
#else
    status[me] = RAISED;
    goto end;
#endif

raised:
    /* record() sends an error of its late reads. */
    if
    :: call == RECORD && restoring ->
        blamed[me] = blamed[me] ^ blame;
        blame = 0;
        misfit = 1;
        goto not_settled
#if !defined(FAULT_REPLY_KEPT_AT_REWIND) && !defined(FAULT_REPLY_DROPPED_AT_REWIND)
    :: draining -> blamed[me] = blamed[me] ^ blame; goto drained
#endif
    :: call == REWIND && restoring -> goto unrecoverable
    :: else
    fi;
    /* A rewind that all ranks begin raises nothing from before. */
    assert(call != REWIND || !all_rewind);
    printf("%d raised\n", me);
    /* No rank raises where all do the same. */
    assert(different || any_error || any_failed || blame);
    blamed[me] = blamed[me] ^ blame;
#ifdef CATCHES
    close();
    goto next;
#else
    status[me] = RAISED;
    goto end;
#endif

unrecoverable:
    /* A rewind fails on all ranks, and only if there is no snapshot or one cannot be restored. */
    assert(different || had_misfit || !own[me].has_snapshot);
    printf("%d raised\n", me);
    status[me] = RAISED;
    goto end;

raised_late:
    blamed[me] = blamed[me] ^ blame;
absent:
limit:
    printf("%d raised\n", me);
#ifdef CATCHES
    goto next;
#else
    status[me] = RAISED;
    goto end;
#endif

ended:
    skip;
    d_step {
        status[me] = ENDED;
        if
        :: ALL(HAS_ENDED) && !different && !any_failed ->
            assert(ALL(SAME_STEPS_TAKEN));
            assert(ALL(IS_BLAMED_ALIKE))
        :: else
        fi
    };
end:
    skip
    }
}

init {
    byte rank;
    atomic {
        do
        :: rank < RANKS ->
            own[rank].stage[0] = READY;
            own[rank].stage[1] = READY;
            status[rank] = RUNNING;
            run Rank(rank);
            rank++
        :: else -> break
        od
    }
}
