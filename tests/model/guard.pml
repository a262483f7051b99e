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
mtype = { UNSCALE_, STEP, STEP_BY_NORM, UPDATE, PROCESS_GROUP, REPORT };
mtype = { ALL_REDUCE, COMPARE, GATHER, SEE_REPLICAS, NEW_GROUP, FIND_ABSENT, BACKWARD };
/* What becomes of a step; of an optimizer of which no rank has a gradient, beside others or not. */
#define TAKEN 1
#define SKIPPED 2
#define SPIKE 3
#define IDLE 4
#define ABSENT_ERROR 5
/* The names of calls, as the digest has them. */
#define NAME_STEP 0
#define NAME_NORM 1
#define NAME_UPDATE 2
#define NAME_REPORT 3
/* Errors that wait for a message. */
#define NOTHING_CHECKED 1
#define OUT_OF_ORDER 2
#define NO_GRADIENTS 3

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
byte counts;
byte total;
bit any_error;
bit all_alike;
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
bit refuses[RANKS];         /* has an error in the order of calls that no message has sent yet */

#define IS(o, what) (own[me].stage[o] == what)
#define HAS_ERROR(i) (error[i])
#define HAS_MORE(i) (asks[i])
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
        any_asks = ANY(HAS_MORE);
        any_looked = ANY(HAS_LOOKED);
        all_lack = ALL(LACKS_SOME);
        messages++;
        if
        :: all_alike && !any_error ->
            /* Ranks that agree have taken the same steps, */
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
        CLEAR(waiting); CLEAR(looked); CLEAR(lacks)
    /* Counted anew: steps that differ since the last message are not seen over a new group. */
    :: collective == NEW_GROUP ->
        CLEAR(owes);
        if :: different || any_failed -> CLEAR(taken) :: else fi
    :: else
    fi
}

/* -- Ranks ------------------------------------------------------------------------------------- */

inline compare() {
    reach(COMPARE);
    if
    :: any_error || !all_alike -> goto raised
    :: else
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

/* Read what is on its way, and raise what it demands. */
inline settle() {
    if
    :: own[me].arriving ->
        own[me].arriving = 0;
        if
        /* Where no rank had looked, each has raised its own error in that call. */
        :: own[me].reply_differs || own[me].reply_error ->
            late = own[me].reply_nobody_looked;
            reach(COMPARE);
            if :: !late -> goto raised :: else fi
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
        count(FUSED, noted)
    :: else
    fi
}

/* Send what this rank found. On a device the host goes on: what differs is NaN, or sets all flags. */
inline exchange(name) {
    closing = about;
    settle();
    d_step {
        alike[me] = name + 4 * about + 16 * own[me].iteration;
#ifndef FAULT_DIGEST_WITHOUT_LIMIT
        alike[me] = alike[me] + 256 * value;
#endif
#ifndef FAULT_DIGEST_WITHOUT_STEPS
        alike[me] = alike[me] + 512 * own[me].calls;
#endif
#ifndef FAULT_UNSENT_IS_NOT_SENT
        waiting[me] = own[me].unsent;
#endif
#ifndef FAULT_FAILURE_IS_NOT_SENT
        waiting[me] = waiting[me] + 4 * own[me].failure;
#endif
        own[me].unsent = 0
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
            own[me].reply_differs = !all_alike || any_error;
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
        :: !all_alike || any_error -> compare()
#ifdef FAULT_WHO_ASKS_COMPARES_ALONE
        :: else -> own[me].clips_agree = own[me].clips_agree && !asked
#else
        :: all_alike && !any_error && any_asks -> compare(); own[me].clips_agree = 0
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
    own[me].scales = 1
}

/* On the host an optimizer that is idle has no flag, as torch leaves none. */
inline hold(o, flag) {
    own[me].checked[o] = !(ON_HOST && ((own[me].idle >> o) & 1));
    own[me].found_inf[o] = flag && own[me].checked[o];
    by[2 * me + o] = messages;
    parted[2 * me + o] = any_error || !all_alike
}

/* All ranks agree on the flags. */
inline agree() {
    exchange(NAME_STEP);
    d_step {
        noted = (any_error || !all_alike -> 3 : counts);
        if :: about & 1 -> hold(0, noted & 1) :: else fi;
        if :: about & 2 -> hold(1, (noted >> 1) & 1) :: else fi
    };
    if
    :: noted && ON_HOST -> own[me].overflowed = 1; reach(GATHER)
    :: else
    fi;
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
        :: any_error || !all_alike -> norm = 2
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
    :: norm == 2 && ON_HOST -> own[me].overflowed = 1; reach(GATHER)
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

/* Step by the flag, or skip, or do nothing for an optimizer that is idle beside others. */
inline apply(o, spikes) {
    if
    :: o == PLAIN && !(ON_HOST && ((own[me].idle >> o) & 1)) -> settle()    /* settle_with_others */
    :: else
    fi;
    noted = ((own[me].idle >> o) & 1 -> IDLE :
             (own[me].found_inf[o] -> SKIPPED : (spikes -> SPIKE : TAKEN)));
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
#if defined(LIMIT) || defined(ABSENT)
        own[me].outcome[o] = noted
#else
        skip
#endif
    :: else -> count(o, noted)
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
    bit before, asked, late;
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
        ready = 0;
        if
        :: position[me] == CALLS -> goto ended
        :: else
        fi;
        choose(position[me]);
        position[me]++;
        if
        :: ALL(IS_PAST) -> program[position[me] - 1] = 0; over[position[me] - 1] = 0
        :: else
        fi;
#ifdef ASKS
        if
        :: settle()                                 /* step_counts */
        :: skip
        fi;
#endif
#if defined(DIFFERS) || defined(REPORTS)
        differ();
#endif
        if
        :: call == 0 -> goto next
        :: else
        fi;
        printf("%d %e %d value %d\n", me, call, about, value);
    if
    :: call == UNSCALE_ ->
        if
        :: ((about & 1) && !IS(0, READY)) || ((about & 2) && !IS(1, READY)) -> refuse(NAME_STEP)
        :: else
        fi;
        set_stage(about, UNSCALED);
        look((about == 3 -> 4 : 2));
        agree()

    :: call == STEP ->
        left = about;
        if
        :: ((about & 1) && IS(0, STEPPED)) || ((about & 2) && IS(1, STEPPED)) ->
            if
            :: (!(about & 1) || own[me].silent[0] || IS(0, UNSCALED)) &&
               (!(about & 2) || own[me].silent[1] || IS(1, UNSCALED)) -> send_later(OUT_OF_ORDER)
            :: else -> refuse(NAME_STEP)
            fi
        :: else
        fi;
        if :: !IS(0, READY) -> about = about & 2 :: else fi;
        if :: !IS(1, READY) -> about = about & 1 :: else fi;
        if :: left & 1 -> own[me].silent[0] = !about :: else fi;
        if :: left & 2 -> own[me].silent[1] = !about :: else fi;
        if
        :: about -> unscale(); look((about == 3 -> 4 : 2)); agree()
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
        :: else -> d_step { reset(0); reset(1); own[me].iteration++ }
        fi;
#ifdef REPORTS
        reach(BACKWARD)
#endif

    :: call == REPORT ->
        announce(NAME_REPORT);
        reach(GATHER)

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
    /* A rank may lose its peers only where one of them did something else, or raised as it stepped; */
    assert(different || any_failed);
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
    printf("%d raised\n", me);
    /* No rank raises where all do the same. */
    assert(different || any_error || any_failed);
#ifdef CATCHES
    close();
    goto next;
#else
    status[me] = RAISED;
    goto end;
#endif

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
        :: ALL(HAS_ENDED) && !different && !any_failed -> assert(ALL(SAME_STEPS_TAKEN))
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
