/* The exchange over two levels, by two lanes: comm_hooks/collectives.py and transport.py on CPUs.
 *
 * Two hosts of two ranks each average JOBS buckets one after another. A rank has two lanes, each
 * a thread with memory of its own; bucket n goes by lane n mod 2. In a turn, one lane of a rank at a
 * time uses the network between hosts. A message is told from others by its two ranks and its tag.
 * Checked: a place in memory that is written to is not read or written by another; whoever receives
 * gets what he waits for; all ranks read the same mean; nothing waits for ever.
 *
 *   -DJOBS=3                how many buckets
 *   -DFAULT_...             a planted fault
 */

#ifndef JOBS
#define JOBS 3
#endif
/* Two hosts of two ranks: rank 2 * host + local. */
#define SIZE 4
#define LANES 2

/* Places of a lane's memory, four to each lane: "received" for the rows of everything[local][host];
   two for "sent". The values of a bucket: two, the parts of both ranks of a host. */
#define RECEIVED 0
#define SENT 4
#define PLACES 6

#ifdef FAULT_LANES_SHARE_MEMORY
#define MEMORY(place) (me * LANES * PLACES + (place))
#else
#define MEMORY(place) ((me * LANES + lane) * PLACES + (place))
#endif

/* Who uses a place: readers, and one writer. */
byte readers[48];
bit writer[48];
/* What lies there: 1 + the bucket's number modulo 3, and in what state. */
byte content[48];

/* A message in the wire: content; from, to and tag by the channel. */
#ifdef FAULT_LANES_SHARE_TAGS
#define TAG(level) (level)
#else
#define TAG(level) (2 * lane + (level))
#endif
#define INNER 1
#define OUTER 0
chan wire[64] = [0] of { byte };
#define WIRE(from, to, level) wire[((from) * SIZE + (to)) * 4 + TAG(level)]

/* Whether the turn of bucket n is over, on each rank. */
byte over[SIZE];
byte in_turn[SIZE];

/* Contents: what was encoded of a part, by whom, of which bucket; a mean, by which owner. */
#define RAW(job, host, part) (1 + 16 * (job) + 2 * (host) + (part))
#define ENCODED(job, host, part) (5 + 16 * (job) + 2 * (host) + (part))
#define MEAN(job, host, part) (9 + 16 * (job) + 2 * (host) + (part))

inline begin_read(p) { assert(!writer[p]); readers[p]++ }
inline end_read(p) { readers[p]-- }
inline begin_write(p) { assert(!writer[p] && readers[p] == 0); writer[p] = 1 }
inline end_write(p, what) { content[p] = what; writer[p] = 0 }
/* A computation of this thread: nothing else may be at these places. */
inline reads(p) { assert(!writer[p]) }
inline writes(p, what) { assert(!writer[p] && readers[p] == 0); content[p] = what }

/* Send one row and receive another, both under way at once; wait for both. */
inline swap(level, other, source, target, expected) {
    if :: source < 48 -> begin_read(source) :: else fi;
    begin_write(target);
    what = (source < 48 -> content[source] : RAW(job, host, 1 - part));
#ifdef FAULT_SWAP_DOES_NOT_WAIT
    run Send(me, lane, other, level, source, what);
    WIRE(other, me, level) ? got;
    receive(target, expected)
#else
    if
    :: WIRE(me, other, level) ! what;
        if :: source < 48 -> end_read(source) :: else fi;
        WIRE(other, me, level) ? got;
        receive(target, expected)
    :: WIRE(other, me, level) ? got;
        receive(target, expected);
        WIRE(me, other, level) ! what;
        if :: source < 48 -> end_read(source) :: else fi
    fi
#endif
}

inline receive(target, expected) {
    /* Whoever receives gets what he waits for. */
    assert(got == expected);
    end_write(target, got)
}

#ifdef FAULT_SWAP_DOES_NOT_WAIT
proctype Send(byte me; byte lane; byte other; byte level; byte source; byte what) {
    WIRE(me, other, level) ! what;
    if :: source < 48 -> end_read(source) :: else fi
}
#endif

proctype Lane(byte me; byte lane) {
    byte job = lane, host = me / 2, part = me % 2;
    byte what, got, beside, across;
    beside = 2 * host + 1 - part;          /* the other rank of this host */
    across = 2 * (1 - host) + part;        /* the rank of the other host that has the same part */
    /* What a lane does by itself is one step; a swap under way keeps its places marked. */
    atomic {
    do
    :: job < JOBS ->
        /* others: what the other rank of this host has of one's own part. */
        swap(INNER, beside, 48, MEMORY(RECEIVED), RAW(job, host, part));
        /* encode */
        atomic {
            reads(MEMORY(RECEIVED));
            writes(MEMORY(SENT), ENCODED(job, host, part));
            writes(MEMORY(SENT + 1), ENCODED(job, host, part))
        };
        /* with turn */
#ifndef FAULT_NO_TURNS
#ifdef FAULT_TURNS_IN_ANOTHER_ORDER
        if
        :: me == 0 && JOBS > 1 -> (over[me] == (job < 2 -> 1 - job : job))
        :: else -> (over[me] == job)
        fi;
#else
        (over[me] == job);
#endif
#endif
        atomic {
            in_turn[me]++;
            /* One lane at a time sends to other hosts. */
            assert(in_turn[me] == 1)
        };
        /* received = everything[0], a row from each host */
        swap(OUTER, across, MEMORY(SENT + 1 - host), MEMORY(RECEIVED + 1 - host),
             ENCODED(job, 1 - host, part));
        atomic {
            reads(MEMORY(SENT + host));
            writes(MEMORY(RECEIVED + host), ENCODED(job, host, part))
        };
        /* sum_encode: the mean of the rows that this rank owns */
        atomic {
            reads(MEMORY(RECEIVED));
            reads(MEMORY(RECEIVED + 1));
            assert(content[MEMORY(RECEIVED + 1 - host)] == ENCODED(job, 1 - host, part));
            writes(MEMORY(SENT), MEAN(job, host, part))
        };
        /* received = everything[local], the mean of each owner in one's own column */
        swap(OUTER, across, MEMORY(SENT), MEMORY(RECEIVED + 2 * part + 1 - host),
             MEAN(job, 1 - host, part));
        atomic {
            reads(MEMORY(SENT));
            writes(MEMORY(RECEIVED + 2 * part + host), MEAN(job, host, part));
            in_turn[me]--;
            over[me]++
        };
        /* What one got goes to the other rank of this host; both rows are one message. */
        swap(INNER, beside, MEMORY(RECEIVED + 2 * part),
             MEMORY(RECEIVED + 2 * (1 - part)), MEAN(job, 0, 1 - part));
        swap(INNER, beside, MEMORY(RECEIVED + 2 * part + 1),
             MEMORY(RECEIVED + 2 * (1 - part) + 1), MEAN(job, 1, 1 - part));
        /* decode: all ranks read the same */
        atomic {
            reads(MEMORY(RECEIVED)); reads(MEMORY(RECEIVED + 1));
            reads(MEMORY(RECEIVED + 2)); reads(MEMORY(RECEIVED + 3));
            assert(content[MEMORY(RECEIVED)] == MEAN(job, 0, 0));
            assert(content[MEMORY(RECEIVED + 1)] == MEAN(job, 1, 0));
            assert(content[MEMORY(RECEIVED + 2)] == MEAN(job, 0, 1));
            assert(content[MEMORY(RECEIVED + 3)] == MEAN(job, 1, 1))
        };
        job = job + LANES
    :: else -> break
    od
    }
}

init {
    byte rank;
    atomic {
        do
        :: rank < SIZE -> run Lane(rank, 0); run Lane(rank, 1); rank++
        :: else -> break
        od
    }
}
