/* How many ranks make how many calls, and how they meet in a collective: part of each model.
 *
 * A model says in `arrived` what a collective does, which the last rank to arrive executes, and in
 * OVERDUE what may end at the group's timeout.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 5
#endif

#if RANKS == 2
#define ALL(x) (x(0) && x(1))
#define ANY(x) (x(0) || x(1))
#else
#define ALL(x) (x(0) && x(1) && x(2))
#define ANY(x) (x(0) || x(1) || x(2))
#endif

#ifdef DEVICE
#define ON_HOST 0
#else
#define ON_HOST 1
#endif

/* Programs for real ranks: calls that stages allow. The model checker tries the others, too. */
#ifdef PROGRAMS
#define FITS(condition) (condition)
#else
#define FITS(condition) true
#endif

mtype = { RUNNING, ENDED, RAISED };
/* torch's stages of an optimizer: plain or fused. */
mtype = { READY, UNSCALED, STEPPED };
#define PLAIN 0
#define FUSED 1

mtype status[RANKS];
byte position[RANKS];
mtype at[RANKS];            /* the collective that a rank waits in; 0 */
bit done[RANKS];

#define IS_AT(i) (at[i] == where)
#define IS_GONE(i) (status[i] != RUNNING)
#define IS_STUCK(i) (at[i] != 0 || status[i] != RUNNING)
#define IS_PAST(i) (position[i] >= position[me])
#define HAS_ENDED(i) (status[i] == ENDED)

inline reach(collective) {
    atomic {
        where = collective;
        at[me] = where;
        if
        :: ALL(IS_AT) ->
            d_step {
                arrived(where);
                i = 0;
                do
                :: i < RANKS -> at[i] = 0; done[i] = 1; i++
                :: else -> break
                od;
                i = 0
            }
        :: else
        fi
    };
    if
    :: atomic { done[me] -> done[me] = 0 }
    /* Only a process that is gone frees those that wait for it. */
    :: atomic { !done[me] && (ANY(IS_GONE)) -> goto lost }
#ifdef DIFFERS
    :: atomic { !done[me] && (ALL(IS_STUCK)) && OVERDUE -> goto lost }
#endif
    fi
}
