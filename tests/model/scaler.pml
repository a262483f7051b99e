/* The messages between ranks: DistGradScaler and RankSync, as distamp/scaler has them.
 *
 * RANKS ranks make up to CALLS calls, the same on all, in any order that the model checker can think
 * of; optimizer 0 is plain, optimizer 1 fused. Any look at gradients may overflow on any rank.
 * Names are those of the code; README.md has the table.
 *
 *   -DRANKS=3 -DCALLS=4     how many
 *   -DDEVICE                the reply is read one call late
 *   -DERROR                 one look, on any rank, raises
 *   -DDIFFERS               one call of rank 0 is left out, or is another, or is about another
 *                           optimizer, or sets another scale
 *   -DFAILS                 one step of each rank may raise after the ranks have agreed to step
 *   -DREPORTS               rank 0 alone calls nonfinite_report() where the others call update(), and
 *                           DDP reduces gradients after each update()
 *   -DCATCHES               a user catches what all ranks raise, and goes on
 *   -DGROUPS -DJOINS        with new groups; with Join([model, scaler])
 *   -DPROGRAMS              for drawing programs, no calls that stages refuse
 *   -DFAULT_...             a planted fault; each breaks an assertion, or makes ranks wait for ever
 *
 * Six of the faults were the code until the model found them (docs/results/model.md).
 *
 * Abstract here: a digest is equal only for equal calls (the code's is a hash of 31 bits); the scale
 * is one of three and grows after each clean iteration; gradients are one bit, whether they overflow.
 */

/* What ends at the group's timeout: on a device, one rank clips and another steps; and a message of
   ours that met a collective which is not ours. */
#define COMPARES(i) (at[i] == COMPARE)
#define COMPARES_REPLICAS(i) (!own[i].clips_agree)
#define IS_IN_TORCH(i) (at[i] == NEW_GROUP || at[i] == POST_HOOK)
#define OVERDUE (clips_alone || ((ANY(IS_IN_TORCH)) && !(ANY(COMPARES))))
#include "ranks.pml"

/* Calls, each with the optimizers it is about: 1 the plain one, 2 the fused one, 3 both. */
mtype = { SCALE, UNSCALE_, STEP, CLIP_GRAD_NORM_, UPDATE, UPDATE_TO, PROCESS_GROUP, JOIN, REPORT };
/* Collectives; what a rank is in. */
mtype = { ALL_REDUCE, COMPARE, GATHER, GATHER_PAIRS, NEW_GROUP, POST_HOOK, BACKWARD };
/* The names of calls, as the digest has them. */
#define NAME_STEP 0
#define NAME_CLIP 1
#define NAME_UPDATE 2
#define NAME_REPORT 3
/* The bit of a norm that is not finite. */
#define NORM 4
/* Errors that wait for a message. */
#define NOTHING_CHECKED 1
#define OUT_OF_ORDER 2


/* The program: each call is chosen by the rank that comes to it first. */
mtype program[CALLS];
byte over[CALLS];

/* State between calls: DistGradScaler, RankSync, and torch's states. */
typedef Scaler {
    byte scale;
    byte begun;
    bit scaled;
    byte iteration;
    bit scales;
    bit clips_agree;        /* replicas were found equal, so a clip gathers nothing */
    bit arriving;           /* a reply that the host has not read */
    bit reply_differs;
    bit reply_error;
    bit reply_nobody_looked;
    bit silent[2];          /* the step sent no message */
    bit overflowed;         /* all ranks know of inf or NaN in this iteration */
    byte unsent;            /* an error that waits for a message */
    byte failure;           /* 1 + the optimizer whose step raised */
    mtype stage[2];
    bit checked[2];
    bit found_inf[2];
    bit kept[2];            /* unscaled before an update(), for step alone */
    byte overflows;         /* a bit for each optimizer whose gradients overflow on this rank */
    byte calls;             /* a sum of 1 or 4 a step, 2 an update(new_scale), modulo 16 */
};
Scaler own[RANKS];

/* The message, and what ranks gather where digests differ. */
int digest[RANKS];
short alike[RANKS];
byte waiting[RANKS];        /* unsent and failure, also a part of the digest */
bit error[RANKS];
bit looked[RANKS];
bit scaled[RANKS];
byte words[RANKS];          /* a bit for each optimizer that overflowed on that rank, and NORM */

/* The reply, until the next: whether the digests sum up for that rank, and the counts. */
bit differs[RANKS];
byte counts;
bit sent_error[RANKS];
bit any_error;
bit all_alike;
bit any_scaled;
bit any_looked;

/* Join. */
byte inputs[RANKS];
byte most;
byte joined_found;          /* how inputs overflow, on all ranks alike: gradients are averaged */
bit joined_chosen;
byte state_iteration;
byte state_scale;
byte state_calls;

/* What only the assertions know. */
byte taken[RANKS];          /* steps taken by the plain optimizer in bits 0 and 1, fused 2 and 3 */
byte messages;
byte by[2 * RANKS];         /* by which message a rank holds a flag */
bit parted[2 * RANKS];      /* and whether ranks differed there */
byte verdict_by[2];
bit verdict[2];
byte state_taken;
bit had_error;
bit different;
bit owes[RANKS];            /* raised alone since the last message */
bit has_failed[RANKS];
bit any_failed;
bit refuses[RANKS];         /* has an error in the order of calls that no message has sent yet */
byte clips[RANKS];          /* the optimizers of the clip whose message this rank sends */
bit clips_alone;            /* one rank's clip met another's step, on a device */

#define IS(o, what) (own[me].stage[o] == what)

/* -- collectives ------------------------------------------------------------------------------- */

#define HAS_ERROR(i) (error[i])
#define HAS_SCALED(i) (scaled[i])
#define HAS_LOOKED(i) (looked[i])
#define HAS_SAME_NAME(i) ((alike[i] & 3) == (alike[0] & 3))
#define IS_ALIKE(i) (alike[i] == alike[0] && waiting[i] == waiting[0])
#define SAME_DIGEST(i) (digest[i] == digest[0] && waiting[i] == waiting[0])
#define OWES_THE_SAME(i) (owes[i] == owes[0])
#define REFUSES(i) (refuses[i] && IS_GONE(i))
#define SAME_SCALE(i) (own[i].scale == own[0].scale)
#define CLIPS_THE_SAME(i) (clips[i] == clips[0])
#define SAME_STEPS_TAKEN(i) (taken[i] == taken[0])

#ifdef FAULT_LINEAR_DIGEST
#if RANKS == 2
#define TOTAL (digest[0] + digest[1])
#else
#define TOTAL (digest[0] + digest[1] + digest[2])
#endif
#define AGREES(i) (TOTAL == RANKS * digest[i])
#else
#define AGREES(i) (ALL(SAME_DIGEST))
#endif

inline forget_taken() {
    i = 0;
    do
    :: i < RANKS -> taken[i] = 0; i++
    :: else -> break
    od;
    i = 0
}

/* The last to arrive does what the collective does. */
inline arrived(collective) {
    if
    :: collective == ALL_REDUCE ->
        counts = 0;
        any_error = ANY(HAS_ERROR);
        clips_alone = !ON_HOST && !(ALL(HAS_SAME_NAME)) && (ANY(COMPARES_REPLICAS));
        all_alike = ALL(IS_ALIKE);
        any_scaled = ANY(HAS_SCALED);
        any_looked = ANY(HAS_LOOKED);
        messages++;
        if
        :: ALL(SAME_DIGEST) && !any_error ->
            /* Ranks that agree have the same scale, have taken the same steps, and clip the same. */
            assert(ALL(SAME_SCALE));
            assert(ALL(SAME_STEPS_TAKEN));
            assert(ALL(CLIPS_THE_SAME));
            /* What one of them raised alone, all did. */
            assert(ALL(OWES_THE_SAME));
            forget_taken()
        :: else
        fi;
        i = 0;
        do
        :: i < RANKS ->
            counts = counts | words[i];
            differs[i] = !(AGREES(i));
            sent_error[i] = error[i];
            i++
        :: else -> break
        od;
        i = 0;
        do
        :: i < RANKS ->
            digest[i] = 0; alike[i] = 0; error[i] = 0; scaled[i] = 0; words[i] = 0;
            waiting[i] = 0; looked[i] = 0; owes[i] = 0; clips[i] = 0;
            i++
        :: else -> break
        od
    :: collective == POST_HOOK ->
        most = 0;
        i = 0;
        do
        :: i < RANKS -> most = (inputs[i] > most -> inputs[i] : most); i++
        :: else -> break
        od;
        i = 0;
        do
        :: i < RANKS ->
            if
            :: inputs[i] == most ->
                state_iteration = own[i].iteration;
                state_scale = own[i].scale;
                state_calls = own[i].calls;
                state_taken = taken[i]
            :: else
            fi;
            i++
        :: else -> break
        od;
        joined_chosen = 0;
        joined_found = 0
    /* Counted anew: steps that differ since the last message are not seen over a new group. */
    :: collective == NEW_GROUP && (different || any_failed) -> forget_taken()
    :: else
    fi;
    i = 0
}

/* -- Ranks ------------------------------------------------------------------------------------- */

inline compare() {
    reach(COMPARE);
    if
    :: any_error || !all_alike || !any_scaled -> goto raised
    :: else
    fi
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
            if
            :: !late && (any_error || !all_alike || !any_scaled) -> goto raised
            :: else -> late = 0
            fi
        :: else
        fi
    :: else
    fi
}

inline write_message(name) {
    d_step {
        if
        :: own[me].iteration == 0 -> own[me].begun = own[me].scale
        :: else
        fi;
        scaled[me] = own[me].scaled;
        clips[me] = (name == NAME_CLIP -> left : 0);
        alike[me] = name;
#ifndef FAULT_DIGEST_WITHOUT_OPTIMIZERS
#ifdef FAULT_CLIP_AFTER_UNSCALE_HAS_NO_OPTIMIZERS
        alike[me] = alike[me] + 4 * about;
#else
        /* A clip has those that were unscaled before, too. */
        alike[me] = alike[me] + 4 * (name == NAME_CLIP -> clips[me] : about);
#endif
#endif
#ifndef FAULT_DIGEST_WITHOUT_ITERATION
        alike[me] = alike[me] + 16 * own[me].iteration;
#endif
#ifndef FAULT_DIGEST_WITHOUT_SCALE
        /* update() and nonfinite_report() compare no scale. */
        alike[me] = alike[me] + (name < NAME_UPDATE -> 256 * own[me].begun : 0);
#endif
#ifndef FAULT_DIGEST_WITHOUT_CALLS
        alike[me] = alike[me] + 1024 * own[me].calls;
#endif
        waiting[me] = own[me].unsent;
#ifndef FAULT_FAILURE_IS_NOT_SENT
        waiting[me] = waiting[me] + 4 * own[me].failure;
#endif
        own[me].unsent = 0;
        digest[me] = alike[me] + 16384 * (own[me].scales || own[me].scaled);
#ifdef FAULT_LINEAR_DIGEST
        digest[me] = name + about + own[me].iteration + own[me].begun + own[me].calls + 1;
        digest[me] = digest[me] + error[me]
#else
        digest[me] = digest[me] + 32768 * error[me]
#endif
    }
}

/* Send what this rank found; note what all agree on. */
inline agree(name) {
    closing = about;
    settle();
    write_message(name);
#ifdef FAULT_OWN_FLAG
    mine = words[me];
#endif
    reach(ALL_REDUCE);
    refuses[me] = 0;
    if
    :: !ON_HOST && own[me].scales ->
        d_step {
            own[me].arriving = 1;
            own[me].reply_differs = differs[me];
            own[me].reply_error = sent_error[me];
            own[me].reply_nobody_looked = !any_looked;
#ifdef FAULT_FLAGS_NOT_SET
            noted = counts
#else
            noted = (differs[me] -> 3 : counts)
#endif
        }
    :: else ->
        if
#ifdef FAULT_ONLY_THE_RANK_WITH_AN_ERROR_GATHERS
        :: sent_error[me] || !(own[me].scales || own[me].scaled) -> compare()
#else
        :: differs[me] || sent_error[me] || !(own[me].scales || own[me].scaled) ->
            compare();
            own[me].clips_agree = 0
#endif
        :: else
        fi;
        own[me].scales = 1;
        noted = counts;
        if
        :: counts && ON_HOST -> own[me].overflowed = 1; reach(GATHER)
        :: else
        fi
    fi;
    closing = 0;
    d_step {
        o = 0;
        do
        :: o < 2 ->
            if
            :: about & (1 << o) ->
                own[me].checked[o] = 1;
#ifdef FAULT_OWN_FLAG
                own[me].found_inf[o] = (mine >> o) & 1;
#else
                own[me].found_inf[o] = (noted >> o) & 1;
#endif
                own[me].kept[o] = 0;
                by[2 * me + o] = messages;
                parted[2 * me + o] = any_error || !all_alike
            :: else
            fi;
            o++
        :: else -> break
        od;
        noted = 0;
        o = 0
    }
}

/* A call that stages refuse: its error travels with the message that the others wait for. On a device
   this rank raises it at once, and the others at their next call. */
inline refuse() {
    d_step { words[me] = 0; error[me] = 1; looked[me] = 0 };
#ifdef FAULT_ORDER_IS_RAISED_ALONE
    d_step { error[me] = 0; refuses[me] = 1 };
    goto alone;
#endif
    refuses[me] = 1;
    agree(NAME_STEP);
    d_step {
        /* On a device what is not stepped yet skips. */
        if :: (about & 1) && !IS(0, STEPPED) -> own[me].stage[0] = UNSCALED; own[me].found_inf[0] = 1 :: else fi;
        if :: (about & 2) && !IS(1, STEPPED) -> own[me].stage[1] = UNSCALED; own[me].found_inf[1] = 1 :: else fi
    };
    goto alone
}

/* An error of a call that sends no message: the next message has it. Before the first message over a
   group there is nothing that it could wait for. */
inline send_later(what) {
    if
#ifdef FAULT_UNSENT_IS_NOT_SENT
    :: own[me].scales -> owes[me] = 1
#else
    :: own[me].scales -> d_step { own[me].unsent = what; owes[me] = 1 }
#endif
    :: else
    fi;
    goto alone
}

/* Make sure that every rank makes this call; it says nothing of scaled losses. */
inline announce(name) {
    about = 0;
    settle();
    write_message(name);
    looked[me] = 1;
    reach(ALL_REDUCE);
    if
    :: differs[me] || sent_error[me] -> compare()
    :: else
    fi
}

/* One rank alone may have called nonfinite_report() here, as all ranks know. */
inline announce_update() {
    if
#ifndef FAULT_UPDATE_SENDS_NOTHING
    :: own[me].overflowed ->
#ifdef FAULT_OVERFLOWED_IS_FORGOTTEN_FIRST
        own[me].overflowed = 0;
#endif
        announce(NAME_UPDATE);
        own[me].overflowed = 0
#endif
    :: else
    fi
}

/* -- DistGradScaler ---------------------------------------------------------------------------- */

/* Look at gradients: any may overflow, and one look may raise. */
inline look(name) {
    atomic {
        words[me] = 0;
        error[me] = 0;
        looked[me] = 1;
        if
        :: about & 1 -> if :: words[me] = 1 :: skip fi
        :: else
        fi;
        if
        :: about & 2 -> if :: words[me] = words[me] | 2 :: skip fi
        :: else
        fi;
#ifdef ERROR
        if
        :: !had_error && FITS(position[me] > 4) -> had_error = 1; error[me] = 1; words[me] = 0
        :: skip
        fi;
#endif
        own[me].overflows = own[me].overflows | words[me];
        /* The norm of gradients that were unscaled before is in the message, too. */
        if
        :: name == NAME_CLIP && !error[me] && (left & own[me].overflows) -> words[me] = words[me] | NORM
        :: else
        fi;
        printf("%d found %d error %d\n", me, words[me] & 3, error[me])
    };
#ifdef FAULT_ERROR_RAISED_ALONE
    if
    :: error[me] -> goto alone
    :: else
    fi;
#endif
    agree(name)
}

/* All ranks compare what they did: whoever raises closes the optimizers of its call. */
inline close() {
    d_step {
        o = 0;
        do
        :: o < 2 ->
            if
            :: (closing & (1 << o)) && any_looked && !IS(o, STEPPED) ->
                own[me].stage[o] = STEPPED;
                own[me].checked[o] = 1;
                own[me].found_inf[o] = 1;
                own[me].kept[o] = 0
            :: else
            fi;
            o++
        :: else -> break
        od;
        o = 0;
        closing = 0
    }
}

inline set_stage(mask, to) {
    if :: mask & 1 -> own[me].stage[0] = to :: else fi;
    if :: mask & 2 -> own[me].stage[1] = to :: else fi
}

/* Step by the flag, or skip. The counts are of the assertions. */
inline apply(o) {
    if
    :: o == PLAIN -> settle()                       /* settle_with_others */
    :: else
    fi;
    atomic {
#ifdef FAULT_STEPS_COUNTED_ALIKE
        own[me].calls = (own[me].calls + 1) % 16;
#else
        own[me].calls = (own[me].calls + (o == PLAIN -> 1 : 4)) % 16;
#endif
#ifdef FAILS
        if
        :: !own[me].found_inf[o] && !has_failed[me] ->
            has_failed[me] = 1;
            any_failed = 1;
            own[me].failure = 1 + o;
            /* It is not tried again: update() comes first. */
            own[me].stage[o] = STEPPED;
            own[me].kept[o] = 0;
            printf("%d fails %d\n", me, o);
            goto alone
        :: skip
        fi;
#endif
        /* What ranks differed in, or one could not look at, steps nothing. */
        assert(own[me].found_inf[o] || !parted[2 * me + o]);
        if
        :: verdict_by[o] == by[2 * me + o] && by[2 * me + o] ->
            /* No rank steps where another skips. */
            assert(verdict[o] == own[me].found_inf[o])
        :: else ->
            verdict_by[o] = by[2 * me + o];
            verdict[o] = own[me].found_inf[o]
        fi;
        if
        :: !own[me].found_inf[o] -> count_taken(o)
        :: else
        fi;
        printf("%d stepped %d taken %d scale %d\n", me, o, !own[me].found_inf[o], own[me].scale);
        own[me].stage[o] = STEPPED;
        own[me].kept[o] = 0
    }
}

inline count_taken(o) {
    if
    :: o == PLAIN -> taken[me] = (taken[me] & 12) | ((taken[me] + 1) & 3)
    :: else -> taken[me] = (taken[me] + 4) & 15
    fi
}

inline forget_kept(mask) {
    if :: (mask & 1) && own[me].kept[0] -> reset(0) :: else fi;
    if :: (mask & 2) && own[me].kept[1] -> reset(1) :: else fi
}

inline reset(o) {
    own[me].stage[o] = READY;
    own[me].checked[o] = 0;
    own[me].found_inf[o] = 0;
    own[me].kept[o] = 0;
    own[me].silent[o] = 0;
    own[me].overflows = own[me].overflows & ~(1 << o);
    by[2 * me + o] = 0;
    parted[2 * me + o] = 0
}

inline end_iteration() {
    a_step = (own[me].stage[0] == STEPPED || own[me].stage[1] == STEPPED);
    o = 0;
    do
    :: o < 2 ->
        if
        :: own[me].stage[o] == UNSCALED && a_step -> own[me].kept[o] = 1
        :: else -> reset(o)
        fi;
        o++
    :: else -> break
    od;
    o = 0;
    own[me].iteration++
}

#define COUNTED(o) (own[me].checked[o] && !own[me].kept[o])
#define CLIPS(o) (!IS(o, STEPPED) && !own[me].kept[o])

inline advance() {
    if
    :: (COUNTED(0) && own[me].found_inf[0]) || (COUNTED(1) && own[me].found_inf[1]) ->
        own[me].scale = (own[me].scale > 0 -> own[me].scale - 1 : 0)
    :: else ->
        own[me].scale = (own[me].scale < 2 -> own[me].scale + 1 : 2)
    fi
}

/* -- one rank ---------------------------------------------------------------------------------- */

inline choose(mine) {
    if
    :: program[mine] == 0 ->
        if
        :: FITS(!own[me].scaled) -> program[mine] = SCALE
        :: FITS(IS(0, READY)) -> program[mine] = UNSCALE_; over[mine] = 1
        :: FITS(IS(1, READY)) -> program[mine] = UNSCALE_; over[mine] = 2
        :: FITS(IS(0, READY) && IS(1, READY)) -> program[mine] = UNSCALE_; over[mine] = 3
        :: FITS(!IS(0, STEPPED)) -> program[mine] = STEP; over[mine] = 1
        :: FITS(!IS(1, STEPPED)) -> program[mine] = STEP; over[mine] = 2
        /* step_all */
        :: FITS(!IS(0, STEPPED) && !IS(1, STEPPED)) -> program[mine] = STEP; over[mine] = 3
        :: FITS(CLIPS(0)) -> program[mine] = CLIP_GRAD_NORM_; over[mine] = 1
        :: FITS(CLIPS(0) && CLIPS(1)) -> program[mine] = CLIP_GRAD_NORM_; over[mine] = 3
        :: FITS(COUNTED(0) || COUNTED(1)) -> program[mine] = UPDATE
        :: FITS(IS(0, STEPPED)) -> program[mine] = UPDATE_TO
#ifdef GROUPS
        :: program[mine] = PROCESS_GROUP
#endif
#ifdef JOINS
        :: program[mine] = JOIN
#endif
        fi
    :: else
    fi;
    call = program[mine];
    about = over[mine];
    value = 2
}

/* One rank does something else, once. */
inline differ() {
    if
#ifdef REPORTS
    :: me == 0 && !different && call == UPDATE && own[me].overflowed ->
        if
        :: skip
        :: different = 1; call = REPORT                                      /* reports alone */
        fi
#else
    :: me == 0 && !different && FITS(position[me] > 4) ->
        if
        :: skip
        :: different = 1;
            if
            :: call = 0                                                  /* leaves it out */
            :: about == 1 || about == 2 -> about = 3 - about             /* another optimizer */
            :: call == STEP && about < 3 -> call = UNSCALE_              /* unscales alone */
            :: call == UPDATE || call == UPDATE_TO -> call = UPDATE_TO; value = 0
            fi
        fi
#endif
    :: else
    fi
}

proctype Rank(byte me) {
    byte about, closing, noted, value, i, o, left, input;
    bit a_step, late;
#ifdef FAULT_OWN_FLAG
    byte mine;
#endif
    mtype call, where;

    /* What a rank does by itself is one step: others see of it what it sends. */
    atomic {
    skip;
next:
        closing = 0; noted = 0; call = 0; about = 0; value = 0; left = 0; where = 0; input = 0; a_step = 0; late = 0;
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
#if defined(DIFFERS) || defined(REPORTS)
        differ();
#endif
        if
        :: call == 0 -> goto next
        :: else
        fi;
        printf("%d %e %d value %d\n", me, call, about, value);
    if
    :: call == SCALE -> d_step { own[me].scaled = 1; forget_kept(3) }

    :: call == UNSCALE_ ->
        d_step { forget_kept(about) };
        if
        :: ((about & 1) && !IS(0, READY)) || ((about & 2) && !IS(1, READY)) -> refuse()
        :: else
        fi;
        set_stage(about, UNSCALED);
        look(NAME_STEP)

    :: call == STEP ->
        left = about;
        if
        :: ((about & 1) && IS(0, STEPPED)) || ((about & 2) && IS(1, STEPPED)) ->
            if
            :: (!(about & 1) || own[me].silent[0] || IS(0, UNSCALED)) &&
               (!(about & 2) || own[me].silent[1] || IS(1, UNSCALED)) -> send_later(OUT_OF_ORDER)
            :: else -> refuse()
            fi
        :: else
        fi;
        if :: own[me].stage[0] != READY -> about = about & 2 :: else fi;
        if :: own[me].stage[1] != READY -> about = about & 1 :: else fi;
        if
        :: left & 1 -> own[me].silent[0] = !about
        :: else
        fi;
        if
        :: left & 2 -> own[me].silent[1] = !about
        :: else
        fi;
        if
        :: about -> if :: about & 1 -> own[me].stage[0] = UNSCALED :: else fi; look(NAME_STEP)
        :: else
        fi;
        if :: left & 1 -> apply(PLAIN) :: else fi;
        if :: left & 2 -> apply(FUSED) :: else fi

    :: call == CLIP_GRAD_NORM_ ->
        left = about;
        d_step { forget_kept(about) };
        if
        :: (about & 1) && own[me].stage[0] == STEPPED -> error[me] = 1
        :: (about & 2) && own[me].stage[1] == STEPPED -> error[me] = 1
        :: else -> error[me] = 0
        fi;
        if
        :: error[me] -> words[me] = 0; looked[me] = 0; about = 0; agree(NAME_CLIP)
        :: else ->
            if :: own[me].stage[0] != READY -> about = about & 2 :: else fi;
            if :: own[me].stage[1] != READY -> about = about & 1 :: else fi;
            set_stage(about, UNSCALED);
            look(NAME_CLIP)
        fi;
        /* The sum of the norms of all ranks. */
        value = (counts != 0);
        if
        :: !own[me].clips_agree ->
            settle();
            reach(GATHER_PAIRS);
            own[me].clips_agree = !value
        :: own[me].clips_agree && ON_HOST && value -> reach(GATHER_PAIRS)
        :: else
        fi;
        d_step {
            /* A norm that is not finite skips all it is of, but where ranks differ: in what? */
            if
            :: any_error || !all_alike -> left = 0
#ifndef FAULT_NORM_SKIPS_ONLY_ITS_OWN
            :: !any_error && all_alike && value ->
                if :: left & 1 -> own[me].found_inf[0] = 1 :: else fi;
                if :: left & 2 -> own[me].found_inf[1] = 1 :: else fi
#endif
            :: else
            fi;
            /* A norm over both that is not finite clips neither, so neither is stepped. */
            assert(left != 3 || !value || (own[me].found_inf[0] && own[me].found_inf[1]));
            left = 0
        }

    :: call == UPDATE ->
        announce_update();
        if
        :: !COUNTED(0) && !COUNTED(1) -> send_later(NOTHING_CHECKED)
        :: else
        fi;
        d_step { advance(); end_iteration() };
#ifdef REPORTS
        reach(BACKWARD)
#endif

    :: call == REPORT ->
        announce(NAME_REPORT);
        reach(GATHER)

    :: call == UPDATE_TO ->
        announce_update();
        d_step {
            own[me].scale = value;
            own[me].begun = value;
            own[me].calls = (own[me].calls + 2) % 16;
            end_iteration()
        }

    :: call == PROCESS_GROUP ->
#ifndef FAULT_REPLY_LEFT_AT_A_NEW_GROUP
        settle();
#endif
        reach(NEW_GROUP);
        d_step {
            own[me].arriving = 0;
            own[me].scales = 0;
            own[me].clips_agree = 0;
            own[me].overflowed = 0;
            own[me].unsent = 0;
            own[me].failure = 0;
            owes[me] = 0;
#ifndef FAULT_ITERATION_KEPT_IN_A_NEW_GROUP
            own[me].iteration = 0;
#endif
            own[me].calls = 0;
            if
            :: me == 0 -> own[me].iteration = 0     /* as a replaced rank that loaded the state */
            :: else
            fi
        }

    :: call == JOIN ->
        if
        :: own[me].stage[0] != READY || own[me].stage[1] != READY -> goto alone
        :: else
        fi;
        /* In Join an update() sends nothing. */
        assert(!own[me].overflowed);
#ifndef FAULT_REPLY_LEFT_AT_JOIN
        settle();                                   /* join_hook */
#endif
        if
        :: own[me].scaled -> left = 0           /* none at all: where it scaled one before */
        :: left = 1
        :: left = 2
        fi;
        inputs[me] = left;
        do
        :: left > 0 ->
            atomic {
                if
                :: !joined_chosen ->
                    joined_chosen = 1;
                    if :: joined_found = 0 :: joined_found = 1 :: joined_found = 2 fi
                :: else
                fi;
                own[me].scaled = 1;
                own[me].stage[0] = UNSCALED;
                own[me].checked[0] = 1;
                own[me].found_inf[0] = (joined_found >> input) & 1;
                by[2 * me] = 0;
                parted[2 * me] = 0
            };
            settle();                               /* settle_with_others */
            d_step {
                if
                :: !own[me].found_inf[0] -> count_taken(PLAIN)
                :: else
                fi;
                own[me].stage[0] = STEPPED;
                own[me].calls = (own[me].calls + 1) % 16;
                if
                /* The second input sets the scale, if the first did not overflow. */
                :: input == 1 && !(joined_found & 1) -> own[me].scale = 2; own[me].begun = 2;
                    own[me].calls = (own[me].calls + 2) % 16
                :: else -> advance()
                fi;
                end_iteration();
                input++;
                left--
            }
        :: else -> break
        od;
        reach(POST_HOOK);
        d_step {
            if
#ifdef FAULT_NOTHING_TAKEN_OVER
            :: 0
#else
            :: inputs[me] < most ->
                own[me].iteration = state_iteration;
                own[me].scale = state_scale;
                own[me].calls = state_calls;
                taken[me] = state_taken             /* DDP broadcasts the model */
#endif
            :: else
            fi;
#ifndef FAULT_BEGUN_KEPT_AFTER_JOIN
            own[me].begun = own[me].scale;
#endif
            inputs[me] = 0
        }
    fi;
    goto next;

lost:
    printf("%d lost\n", me);
    /* A rank may lose its peers only where one of them did something else. */
    assert(different || any_failed);
    /* On the host none loses them for an error in the order of calls. */
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
    assert(different || any_error || !any_scaled || any_failed);
#ifdef CATCHES
    close();
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
        :: ALL(HAS_ENDED) && !different && !any_failed -> assert(ALL(SAME_SCALE)); assert(ALL(SAME_STEPS_TAKEN))
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
            own[rank].scale = 1;
            own[rank].begun = 1;
            own[rank].stage[0] = READY;
            own[rank].stage[1] = READY;
            status[rank] = RUNNING;
            run Rank(rank);
            rank++
        :: else -> break
        od
    }
}
