/*
 * Progress of the fence under nonstop traffic, as a model for spin. README.md says what is modelled; run.sh checks it.
 *
 * Each producer is always in a transaction: it begins the next one as it ends one. Sets of producers stand for xids: a pair
 * is proven by xid when each transaction that was running when its xid was taken has ended, so what it waits for can only
 * shrink. Progress: a pair is proven, again and again. (There is always more to prove: the producers go on.)
 *
 *   OVERWRITE       each poll replaces the pair (with a pair by xid)
 *   EXCHANGE_OFTEN  a pair with holders is exchanged for a newer one as well, not once
 *   UNRELATED       a transaction that never ends holds xmin back; the proof by xid is never given
 *   NO_LOOK         there is no proof by lock
 */

#define PRODUCERS 3
#define ALL ((1 << PRODUCERS) - 1)

bool waits = false;             /* there is a pair, and it is not proven */
bool looked = false;
bool aged = false;              /* a poll has found it waiting */
byte older = 0;                 /* set of producers: their transactions are below the pair's xid */
byte holders = 0;               /* set of producers: their transactions were seen with the lock */

active [PRODUCERS] proctype Producer() {
    do
    :: atomic {
        older = older & ~(1 << _pid);
        holders = holders & ~(1 << _pid);
        printf("producer %d: ends a transaction, begins the next\n", _pid + 1)
    }
    od
}

#ifdef UNRELATED
#define by_xid false
#else
#define by_xid (older == 0)
#endif
#define by_lock (looked && holders == 0)

#if defined(OVERWRITE)
#define replace waits
#elif defined(NO_LOOK)
#define replace false
#elif defined(EXCHANGE_OFTEN)
#define replace (waits && aged)
#else
#define replace (waits && aged && !looked)
#endif

active proctype Poller() {
    bool look = false;

    do
    :: if
        :: atomic { waits && (by_xid || by_lock) -> waits = false; printf("poller: the pair is proven\n") };
progress_first:
            skip
        :: atomic { else -> printf("poller: not proven\n") }
        fi;
        if
        :: atomic { !waits || replace ->
#if !defined(NO_LOOK) && !defined(OVERWRITE)
            look = waits;
#endif
            printf("poller: reads the head\n") };
            if
            :: atomic { look -> holders = ALL; printf("poller: looks for holders, finds all producers\n") }
            :: else -> holders = 0
            fi;
            atomic {
                older = ALL;
                looked = look;
                look = false;
                waits = true;
                aged = false;
                printf("poller: takes an xid, stores the pair\n")
            };
            if
            :: atomic { by_xid || by_lock -> waits = false; printf("poller: the pair is proven\n") };
progress_second:
                skip
            :: else
            fi
        :: else -> aged = waits
        fi
    od
}
