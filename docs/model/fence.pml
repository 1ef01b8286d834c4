/*
 * The fence, as a model for spin. README.md says what is modelled; run.sh checks it.
 *
 * Every atomic block is one thing that PostgreSQL does at one moment. Between two of them anything may happen.
 *
 * The design is what this file says with no switch set but HEAD_EXACT or HEAD_VISIBLE. Each other switch takes one
 * protection out:
 *
 *   RAW           claims up to the head, without a proof
 *   XMAX          the pair's xid is the snapshot's xmax
 *   EARLY_XID     the pair's xid was taken before the head was read
 *   ID_FIRST      a producer draws its id before it has an xid
 *   CACHE         the sequence has CACHE 2
 *   HEAD_PLAIN    the head is a plain last_value, which can be too high for a moment
 *   LOOK_FIRST    the head is read after the look at the holders
 *   LOOK_SAME     the statement that looks at the holders also reads the rows
 *   BY_PID        a holder is named by what PREPARE TRANSACTION changes, such as its pid
 *   BY_SAVEPOINT  a holder is named by the xid of its savepoint
 *   OLD_ROWS      the rows are read with a snapshot older than the proof
 *   FORGET        a new pair replaces a proven one without keeping what was proven
 *
 * REACH_XID, REACH_LOCK and REACH_FULL ask whether the search gets anywhere at all: each must fail.
 */

#ifndef PRODUCERS
#define PRODUCERS 3
#endif
#ifndef ROUNDS
#define ROUNDS 1                /* transactions per session */
#endif
#ifndef TURNS
#define TURNS 2                 /* turns of the poller */
#endif
#ifndef SAVEPOINTS
#define SAVEPOINTS 0            /* the first so many sessions may set a savepoint */
#endif
#ifndef PREPARES
#define PREPARES 0              /* the last so many sessions may prepare their transaction */
#endif
#ifndef UNRELATED
#define UNRELATED 1             /* a transaction that writes elsewhere and stays open as long as it likes */
#endif

/* Which proof a broken variant is about; the design has both. */
#if defined(XMAX) || defined(EARLY_XID) || defined(ID_FIRST) || defined(RAW) || defined(HEAD_PLAIN)
#define NO_LOCK_PROOF
#endif
#if defined(LOOK_FIRST) || defined(LOOK_SAME) || defined(BY_PID) || defined(BY_SAVEPOINT)
#define NO_XID_PROOF
#endif

#define BIT(n) (1 << (n))
#define BELOW(n) (BIT(n) - 1)

/* ---- the server ---- */

byte next_xid = 1;
byte latest = 0;                /* latest completed xid */
short running = 0;              /* set of xids */

byte drawn = 0;                 /* the sequence's last value */
#ifdef HEAD_PLAIN
byte drawing = 0;               /* how many sessions are inside nextval() */
#endif
byte appeared = 0;              /* set of ids: committed, so visible to each later snapshot */
byte gaps = 0;                  /* set of ids that nobody can commit any more */

/* pg_locks, by session: the lock on the sequence, with the xid that is locked beside it. */
byte holder[PRODUCERS];         /* the top xid, 0 without a lock */
#ifdef BY_SAVEPOINT
byte holder_sub[PRODUCERS];
#endif
bool prepared[PRODUCERS];       /* pid is null */
#define name(p) (prepared[p] -> p + PRODUCERS : p)      /* BY_PID */

/* ---- what weir stores ---- */

byte settled = 0;
byte pair_head = 0;             /* 0: no pair */
byte pair_xid = 0;              /* 0: none */
bool looked = false;
short holders = 0;              /* set of xids (BY_PID: of names) */
byte cursor = 0;

byte turn = 0;
#define on (turn < TURNS)       /* what happens after the poller's last turn is of no interest */

byte begun = 0;                 /* plain sessions are alike, so they begin in order: it saves states, not cases */
#define plain(p) (p >= SAVEPOINTS && p < PRODUCERS - PREPARES)
#define in_order(p) (!plain(p) || round > 0 || begun == p - SAVEPOINTS)

/* ---- the snapshot of the present step: nothing of it outlives the atomic block that takes it ---- */

#ifdef SHORTEST                 /* breadth first, which allows no hidden variables */
#define scratch
#else
#define scratch hidden          /* no part of the state */
#endif

scratch byte xmin;
scratch byte xmax;
scratch int xip;                /* set of xids */
scratch int rows;               /* set of ids */
scratch byte i;
scratch int passed;             /* set of ids */
scratch int seen_now;
scratch byte by_xid;
scratch byte by_lock;

inline take_snapshot() {
    d_step {
        xmax = latest + 1;
        xip = running & BELOW(xmax);
        rows = appeared;
        xmin = 1;
        do
        :: xmin < xmax && !(running & BIT(xmin)) -> xmin++
        :: else -> break
        od
    }
}

inline give_xid(x) {
    x = next_xid;
    running = running | BIT(x);
    next_xid++
}

/* A transaction or savepoint leaves the running set; latest completed xid follows. */
inline end_xid(x) {
    d_step {
        running = running & ~BIT(x);
        if
        :: x > latest -> latest = x
        :: else
        fi
    }
}

/* What weir.fence_rows says for the snapshot taken: the bound, and by which proof. */
inline judge(bound) {
    d_step {
        bound = settled;
        by_xid = false;
        by_lock = false;
        if
        :: pair_head > 0 ->
            by_xid = pair_xid > 0 && pair_xid <= xmin;
#ifdef BY_PID
            by_lock = looked;
            i = 0;
            do
            :: i < PRODUCERS ->
                if
                :: (holders & BIT(name(i))) && holder[i] > 0 -> by_lock = false
                :: else
                fi;
                i++
            :: else -> break
            od
#else
            by_lock = looked && !(holders & xip) && !(holders >> xmax);
#endif
            if
            :: (by_xid || by_lock) && pair_head > settled -> bound = pair_head
            :: else
            fi
        :: else
        fi
    }
}

/* The holders of the sequence's lock at this moment. */
inline look_at_locks() {
    d_step {
        seen_now = 0;
        i = 0;
        do
        :: i < PRODUCERS ->
            if
#if defined(BY_PID)
            :: holder[i] > 0 -> seen_now = seen_now | BIT(name(i))
#elif defined(BY_SAVEPOINT)
            :: holder[i] > 0 -> seen_now = seen_now | BIT((holder_sub[i] > 0 -> holder_sub[i] : holder[i]))
#else
            :: holder[i] > 0 -> seen_now = seen_now | BIT(holder[i])
#endif
            :: else
            fi;
            i++
        :: else -> break
        od
    }
}

/* ---- a producer: one session ---- */

inline begin() {
    if
    :: plain(p) && round == 0 -> begun++
    :: else
    fi
}

inline draw(ids) {
#ifdef CACHE
    if
    :: cached > 0 ->
        ids = ids | BIT(cached);
        printf("producer %d: draws id %d, from its cache\n", p + 1, cached);
        cached = 0
    :: else ->
        drawn = drawn + 2;
        cached = drawn;
        ids = ids | BIT(drawn - 1);
        printf("producer %d: draws id %d, caches id %d\n", p + 1, drawn - 1, drawn)
    fi
#else
    drawn++;
#ifdef HEAD_PLAIN
    drawing--;
#endif
    ids = ids | BIT(drawn);
    printf("producer %d: draws id %d\n", p + 1, drawn)
#endif
}

inline set_savepoint() {
    atomic {
        on && p < SAVEPOINTS;
        give_xid(sub);
#ifdef BY_SAVEPOINT
        holder_sub[p] = sub;
#endif
        printf("producer %d: sets a savepoint, takes xid %d for it\n", p + 1, sub)
    };
    atomic { on; draw(subs) }
}

inline rollback_to_savepoint() {
    atomic {
        on;
        gaps = gaps | subs;
        subs = 0;
        end_xid(sub);
        sub = 0;
#ifdef BY_SAVEPOINT
        holder_sub[p] = 0;
#endif
        printf("producer %d: rolls back to the savepoint\n", p + 1)
    }
}

inline prepare() {
    atomic {
        on && p >= PRODUCERS - PREPARES;
        prepared[p] = true;
        printf("producer %d: PREPARE TRANSACTION\n", p + 1)
    }
}

/* The rows become visible as the transaction leaves the running set; its locks are still there then. */
inline finish() {
    atomic {
        on;
        if
        :: appeared = appeared | mine | subs; printf("producer %d: commits: its rows are visible\n", p + 1)
        :: gaps = gaps | mine | subs; printf("producer %d: rolls back\n", p + 1)
        fi;
        end_xid(xid);
        if
        :: sub > 0 -> end_xid(sub)
        :: else
        fi;
        xid = 0;
        sub = 0;
        mine = 0;
        subs = 0
    }
}

proctype Producer(byte p) {
    byte round = 0;
    byte xid = 0;
    byte sub = 0;               /* the savepoint's xid */
    byte mine = 0;              /* set of ids, drawn by the transaction itself */
    byte subs = 0;              /* set of ids, drawn under the savepoint */
#ifdef CACHE
    byte cached = 0;
#endif

again:
#ifdef ID_FIRST
    atomic { on && in_order(p); begin(); draw(mine) };
    atomic { on; give_xid(xid); holder[p] = xid; printf("producer %d: takes xid %d\n", p + 1, xid) };
#else
    atomic { on && in_order(p); begin(); give_xid(xid); printf("producer %d: takes xid %d\n", p + 1, xid) };
#ifdef HEAD_PLAIN
    atomic { on; drawing++; printf("producer %d: is inside nextval()\n", p + 1) };
#endif
    /* nextval() locks the sequence, then draws. Had a look found the lock before the id, it would only wait for longer. */
    atomic { on; holder[p] = xid; draw(mine) };
#endif
    if
    :: finish()
    :: prepare(); finish()
    :: set_savepoint();
        if
        :: finish()
        :: rollback_to_savepoint(); finish()
        fi
    fi;
    atomic {
        on;
        holder[p] = 0;
        prepared[p] = false;
#ifdef BY_SAVEPOINT
        holder_sub[p] = 0;
#endif
        printf("producer %d: releases its locks\n", p + 1);
        round++;
        if
        :: round < ROUNDS -> goto again
        :: else
#ifdef CACHE
            -> gaps = gaps | (cached > 0 -> BIT(cached) : 0)    /* the session ends, what it cached is lost */
#endif
        fi
    }
}

/* ---- a transaction that has nothing to do with the topic ---- */

proctype Unrelated() {
    byte xid = 0;

    atomic { on; give_xid(xid); printf("unrelated transaction: takes xid %d\n", xid) };
    atomic { on; end_xid(xid); xid = 0; printf("unrelated transaction: ends\n") }
}

/* ---- the poller: each turn is one READ COMMITTED transaction ---- */

#define WAIT 0                  /* a pair waits for its proof, or there is nothing to observe */
#define OBSERVE 1
#define OBSERVE_AND_LOOK 2

/* Its first statement. */
inline begin_turn() {
#if !defined(XMAX) && !defined(RAW) && !defined(NO_XID_PROOF)
    /* It may have an xid already: the caller has acknowledged something in the same transaction, say. */
    if
    :: give_xid(own); printf("poller: acknowledges something, which takes xid %d\n", own)
    :: true
    fi;
#endif
    take_snapshot();
#ifdef OLD_ROWS
    old_rows = rows;
    printf("poller: takes the snapshot that it will read rows with\n");
#endif
    judge(bound);
    report();
    todo = WAIT;
    if
    :: pair_head > bound                                            /* it is kept */
#if defined(EARLY_XID)
    :: pair_head <= bound -> todo = OBSERVE
#elif defined(NO_XID_PROOF)
    :: pair_head <= bound -> todo = OBSERVE_AND_LOOK
#elif defined(NO_LOCK_PROOF)
    :: pair_head <= bound && own > 0
    :: pair_head <= bound && own == 0 -> todo = OBSERVE
#else
    :: pair_head > bound && !looked -> todo = OBSERVE_AND_LOOK      /* after a while it is exchanged, once */
    :: pair_head <= bound && own > 0 -> todo = OBSERVE_AND_LOOK
    :: pair_head <= bound && own == 0 -> todo = OBSERVE
#endif
    fi
}

inline read_head() {
#if defined(HEAD_VISIBLE)
    take_snapshot();
    head = 0;
    i = 1;
    do
    :: (rows >> i) > 0 -> head = ((rows & BIT(i)) -> i : head); i++
    :: else -> break
    od;
    printf("poller: reads the head, the highest visible id: %d\n", head);
#elif defined(HEAD_PLAIN)
    if
    :: head = drawn
    :: drawing > 0 -> head = drawn + 2      /* nextval() writes a value ahead before the real one */
    fi;
    printf("poller: reads the head, a plain last_value: %d\n", head);
#else
    head = drawn;
    printf("poller: reads the head, the exact last value: %d\n", head);
#endif
    if
    :: head <= bound -> todo = WAIT; seen = 0; head = 0
    :: else
    fi
}

inline look() {
    look_at_locks();
    seen = seen_now;
#ifdef LOOK_SAME
    none_found = (seen == 0);
#endif
    if
    :: seen == 0 -> printf("poller: looks for holders of the sequence's lock, finds none\n")
    :: else -> printf("poller: looks for holders of the sequence's lock, finds some\n")
    fi
}

inline store_pair() {
    take_snapshot();
#ifndef FORGET
    judge(settled);
#endif
    pair_head = head;
    looked = (todo == OBSERVE_AND_LOOK);
    holders = seen;
    seen = 0;
#if defined(XMAX)
    pair_xid = xmax;
#else
    pair_xid = 0;
    if
    :: own == 0 -> give_xid(own); pair_xid = own
    :: else                     /* it says nothing about the head */
    fi;
#if defined(EARLY_XID)
    pair_xid = own;
#elif defined(NO_XID_PROOF)
    pair_xid = 0;
#endif
#endif
#ifndef RAW
    if
    :: looked -> printf("poller: stores head %d with the holders\n", pair_head)
    :: else -> printf("poller: stores head %d with xid %d\n", pair_head, pair_xid)
    fi
#endif
}

/* What this statement says is settled. It never falls. */
inline report() {
    if
    :: bound < highest -> printf("poller: the settled head falls from %d to %d\n", highest, bound)
    :: else
    fi;
    assert(bound >= highest);
    highest = bound;
#if defined(REACH_XID)
    assert(!(bound > cursor && by_xid && !by_lock))
#elif defined(REACH_LOCK)
    assert(!(bound > cursor && by_lock && !by_xid))
#elif defined(REACH_FULL)
    assert(!(bound == PRODUCERS && cursor > 0))
#endif
}

/* The cursor moves to the bound, the rows are read, the transaction ends. */
inline claim() {
#ifdef RAW
    bound = (head > bound -> head : bound);
#endif
    if
    :: bound > cursor ->
        take_snapshot();
#if defined(OLD_ROWS)
        rows = old_rows;
#elif defined(LOOK_SAME)
        if
        :: none_found -> rows = old_rows
        :: else
        fi;
#endif
        printf("poller: claims (%d, %d] and reads its rows\n", cursor, bound);
        passed = BELOW(bound + 1) & ~BELOW(cursor + 1) & ~rows & ~gaps;
        i = 1;
        do
        :: (passed >> i) > 0 ->
            if
            :: passed & appeared & BIT(i) -> printf("id %d was not read, though it is committed\n", i)
            :: passed & ~appeared & BIT(i) -> printf("id %d was not read, and can still appear\n", i)
            :: else
            fi;
            i++
        :: else -> break
        od;
        assert(!passed);
        cursor = bound
    :: else
    fi;
    if
    :: own > 0 -> end_xid(own)
    :: else
    fi;
    own = 0;
    todo = WAIT;
    head = 0;
    bound = 0;
#if defined(OLD_ROWS) || defined(LOOK_SAME)
    old_rows = 0;
    none_found = false;
#endif
    turn++
}

proctype Poller() {
    byte own = 0;               /* this transaction's xid */
    byte todo = WAIT;
    byte head = 0;
    short seen = 0;             /* set of holders */
    byte bound = 0;
    byte highest = 0;
#if defined(OLD_ROWS) || defined(LOOK_SAME)
    byte old_rows = 0;          /* set of ids */
    bool none_found = false;
#endif

    do
    :: atomic { on; begin_turn() };
        if
        :: todo != WAIT ->
#ifdef LOOK_FIRST
            if
            :: todo == OBSERVE_AND_LOOK -> atomic { look() }
            :: else
            fi;
#endif
            atomic { read_head() };
            if
            :: todo == OBSERVE_AND_LOOK ->
#ifdef LOOK_SAME
                atomic { take_snapshot(); old_rows = rows; printf("poller: starts the statement that looks, takes its snapshot\n") };
#endif
#ifndef LOOK_FIRST
                atomic { look() }
#endif
            :: else
            fi;
            if
            :: todo != WAIT ->
                atomic { store_pair() };
                atomic { take_snapshot(); judge(bound); report() }
            :: else
            fi
        :: else
        fi;
        atomic { claim() }
    :: else -> break
    od
}

init {
    byte n = 0;

    atomic {
        do
        :: n < PRODUCERS -> run Producer(n); n++
        :: else -> break
        od;
        if
        :: UNRELATED -> run Unrelated()
        :: else
        fi;
        run Poller()
    }
}
