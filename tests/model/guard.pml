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
mtype = { UNSCALE_, STEP, STEP_BY_NORM, UPDATE, PROCESS_GROUP };
mtype = { ALL_REDUCE, COMPARE, GATHER, SEE_REPLICAS, NEW_GROUP };
/* What becomes of a step. */
#define TAKEN 1
#define SKIPPED 2
#define SPIKE 3

mtype program[CALLS];
byte over[CALLS];

/* What survives a call: Guard, Ranks, OptimizerState and torch's records. */
typedef Own {
    byte iteration;
    byte calls;             /* a sum of 1 or 4 a step, modulo 16 */
    bit scales;             /* a message was exchanged over this group */
    bit clips_agree;
    bit arriving;           /* a reply that the host has not read, */
    bit reply_differs;
    bit reply_error;
    bit reply_asks;
    byte outcome[2];        /* and outcomes */
    byte in_a_row[2];
    mtype stage[2];
    bit found_inf[2];
};
Own own[RANKS];

/* The message: a digest, and flags (a bit for each optimizer) or a norm, which is fine (0), above the
   limit (1) or not finite (2); the reply. */
short alike[RANKS];
bit error[RANKS];
byte words[RANKS];
bit sent_error[RANKS];
bit asks[RANKS];
bit any_asks;
byte counts;
byte total;
bit any_error;
bit all_alike;

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

#define IS(o, what) (own[me].stage[o] == what)
#define HAS_ERROR(i) (error[i])
#define HAS_MORE(i) (asks[i])
#define IS_ALIKE(i) (alike[i] == alike[0])
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
        messages++;
        if
        :: all_alike && !any_error ->
            /* Ranks that agree have taken the same steps. */
            assert(ALL(SAME_STEPS_TAKEN));
            CLEAR(taken)
        :: else
        fi;
        counts = 0;
        total = 0;
        i = 0;
        do
        :: i < RANKS ->
            counts = counts | words[i];
            total = (words[i] > total -> words[i] : total);
            sent_error[i] = error[i];
            i++
        :: else -> break
        od;
        CLEAR(alike); CLEAR(error); CLEAR(words); CLEAR(asks)
    /* Counted anew: steps that differ since the last message are not seen over a new group. */
    :: collective == NEW_GROUP && different -> CLEAR(taken)
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
        :: own[me].reply_differs || own[me].reply_error -> compare()
        :: else
        fi;
        own[me].clips_agree = own[me].clips_agree && !own[me].reply_asks
    :: else
    fi;
    if
    :: own[me].outcome[FUSED] ->
        noted = own[me].outcome[FUSED];
        own[me].outcome[FUSED] = 0;
        count(FUSED, noted)
    :: else
    fi
}

/* Send what this rank found. On a device the host goes on: what differs is NaN, or sets all flags. */
inline exchange(name) {
    closing = about;
    settle();
    d_step {
        alike[me] = name + 2 * about + 8 * own[me].iteration;
#ifndef FAULT_DIGEST_WITHOUT_LIMIT
        alike[me] = alike[me] + 64 * value;
#endif
#ifndef FAULT_DIGEST_WITHOUT_STEPS
        alike[me] = alike[me] + 128 * own[me].calls
#endif
    };
#ifdef FAULT_OWN_NORM
    mine = words[me];
#endif
#ifdef FAULT_SKIPS_COUNT_BY_THEIR_OWN
    mine = words[me];
#endif
    reach(ALL_REDUCE);
    if
    :: !ON_HOST && own[me].scales ->
        d_step {
            own[me].arriving = 1;
            own[me].reply_differs = !all_alike || any_error;
            own[me].reply_error = sent_error[me];
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
        fi
    fi;
    own[me].scales = 1
}

inline hold(o, flag) {
    own[me].found_inf[o] = flag;
    by[2 * me + o] = messages;
    parted[2 * me + o] = any_error || !all_alike
}

/* All ranks agree on the flags. */
inline agree() {
    exchange(0);
    d_step {
        noted = (any_error || !all_alike -> 3 : counts);
        if :: about & 1 -> hold(0, noted & 1) :: else fi;
        if :: about & 2 -> hold(1, (noted >> 1) & 1) :: else fi
    };
    if
    :: noted && ON_HOST -> reach(GATHER)
    :: else
    fi;
    closing = 0
}

/* All ranks agree on a norm over all that the call is about: skip it, or step it. */
inline agree_on_norm() {
    exchange(1);
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
    :: norm == 2 && ON_HOST -> reach(GATHER)
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
        assert(about != 3 || own[me].found_inf[0] == own[me].found_inf[1])
    }
}

/* A call that stages refuse: its error travels with the message that the others wait for. On a device
   this rank raises it at once, and the others at their next call. */
inline refuse(name) {
    d_step { about = 0; words[me] = 0; error[me] = 1 };
    exchange(name);
    goto alone
}

/* -- StepGuard --------------------------------------------------------------------------------- */

/* Look at gradients, of which there are so many kinds; one look may raise. Flags are a bit for each
   optimizer. */
inline look(kinds) {
    atomic {
        words[me] = 0;
        error[me] = 0;
        if
        :: words[me] = 0
        :: words[me] = 1
        :: kinds > 2 -> words[me] = 2
        :: kinds > 3 -> words[me] = 3
        fi;
        words[me] = (kinds == 2 && about == 2 -> 2 * words[me] : words[me]);
#ifdef ERROR
        if
        :: !had_error && FITS(position[me] > 3) -> had_error = 1; error[me] = 1; words[me] = 0
        :: skip
        fi;
#endif
        printf("%d found %d error %d\n", me, words[me], error[me])
    }
}

inline close() {
    d_step {
        if :: closing & 1 -> own[me].stage[0] = STEPPED; own[me].found_inf[0] = 1 :: else fi;
        if :: closing & 2 -> own[me].stage[1] = STEPPED; own[me].found_inf[1] = 1 :: else fi;
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

/* Step by the flag, or skip. */
inline apply(o, spikes) {
    if
    :: o == PLAIN -> settle()                       /* settle_with_others */
    :: else
    fi;
    d_step {
        /* What ranks differed in, or one could not look at, steps nothing. */
        assert(own[me].found_inf[o] || !parted[2 * me + o]);
        noted = (own[me].found_inf[o] -> SKIPPED : (spikes -> SPIKE : TAKEN));
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
        own[me].stage[o] = STEPPED;
        own[me].calls = (own[me].calls + (o == PLAIN -> 1 : 4)) % 16
    };
    printf("%d stepped %d taken %d scale 0\n", me, o, noted == TAKEN);
#ifdef FAULT_SKIPS_COUNT_BY_THEIR_OWN
    noted = (noted == SKIPPED && !mine -> TAKEN : noted);
#endif
    if
    :: !ON_HOST && o == FUSED ->
#ifdef LIMIT
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
    by[2 * me + o] = 0;
    parted[2 * me + o] = 0
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
        :: FITS(!IS(0, READY) || !IS(1, READY)) -> program[mine] = UPDATE
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
    :: else
    fi
}

proctype Rank(byte me) {
    byte about, closing, noted, norm, value, i, left;
    bit before, asked;
#ifdef FAULT_OWN_NORM
    byte mine;
#endif
#ifdef FAULT_SKIPS_COUNT_BY_THEIR_OWN
    byte mine;
#endif
    mtype call, where;

    /* What a rank does by itself is one step: others see of it what it sends. */
    atomic {
    skip;
next:
        closing = 0; noted = 0; norm = 0; before = 0; call = 0; about = 0; value = 0; left = 0; where = 0; asked = 0;
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
#ifdef DIFFERS
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
        :: ((about & 1) && !IS(0, READY)) || ((about & 2) && !IS(1, READY)) -> refuse(0)
        :: else
        fi;
        set_stage(about, UNSCALED);
        look((about == 3 -> 4 : 2));
        agree()

    :: call == STEP ->
        left = about;
        if
        :: ((about & 1) && IS(0, STEPPED)) || ((about & 2) && IS(1, STEPPED)) -> refuse(0)
        :: else
        fi;
        if :: !IS(0, READY) -> about = about & 2 :: else fi;
        if :: !IS(1, READY) -> about = about & 1 :: else fi;
        if
        :: about -> unscale(); look((about == 3 -> 4 : 2)); agree()
        :: else
        fi;
        if :: left & 1 -> apply(PLAIN, 0) :: else fi;
        if :: left & 2 -> apply(FUSED, 0) :: else fi

    :: call == STEP_BY_NORM ->
        if
        :: ((about & 1) && IS(0, STEPPED)) || ((about & 2) && IS(1, STEPPED)) -> refuse(1)
        :: else
        fi;
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
        if :: about & 1 -> apply(PLAIN, norm == 1) :: else fi;
        if :: about & 2 -> apply(FUSED, norm == 1) :: else fi

    :: call == UPDATE ->
        if
        :: IS(0, READY) && IS(1, READY) -> goto alone
        :: else -> d_step { reset(0); reset(1); own[me].iteration++ }
        fi

    :: call == PROCESS_GROUP ->
        settle();
        reach(NEW_GROUP);
        d_step {
            own[me].scales = 0;
            own[me].iteration = 0;
            own[me].calls = 0;
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
    /* A rank may lose its peers only where one of them did something else. */
    assert(different);
    at[me] = 0;
    status[me] = RAISED;
    goto end;

alone:
    printf("%d alone\n", me);
    status[me] = RAISED;
    goto end;

raised:
    printf("%d raised\n", me);
    /* No rank raises where all do the same. */
    assert(different || any_error);
#ifdef CATCHES
    close();
    goto next;
#else
    status[me] = RAISED;
    goto end;
#endif

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
        :: ALL(HAS_ENDED) && !different -> assert(ALL(SAME_STEPS_TAKEN))
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
