package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// entry is a line of the ledger, and the payload of the message about it.
type entry struct {
	Entry   string `json:"entry"` // no other has it
	Account string `json:"account"`
	Cents   int64  `json:"cents"`
}

// pace spreads the messages of all producers evenly, and says which transactions are held open.
type pace struct {
	mu      sync.Mutex
	rate    float64
	next    time.Time
	rng     *rand.Rand
	holdAt  time.Time
	longest time.Duration
}

// wait waits for the turn of n messages, and says how long to hold their transaction open. It is false when ctx has ended.
func (p *pace) wait(ctx context.Context, n int) (hold time.Duration, ok bool) {
	p.mu.Lock()
	now := time.Now()
	// What a slow server missed is made up for a little only, not in one burst.
	if late := now.Add(-200 * time.Millisecond); p.next.Before(late) {
		p.next = late
	}
	at := p.next
	p.next = at.Add(time.Duration(float64(n) / p.rate * float64(time.Second)))
	if at.After(p.holdAt) {
		hold = 200*time.Millisecond + time.Duration(p.rng.Int64N(int64(p.longest-200*time.Millisecond)))
		p.holdAt = at.Add(600*time.Millisecond + time.Duration(p.rng.Int64N(int64(1800*time.Millisecond))))
	}
	p.mu.Unlock()
	pause(ctx, time.Until(at))
	return hold, ctx.Err() == nil
}

// produce runs the producers until ctx ends. A transaction that is open by then is committed, or rolled back, at once.
func (d *demo) produce(ctx context.Context) {
	now := time.Now()
	p := &pace{
		rate: float64(d.o.Rate), next: now,
		rng:     rand.New(rand.NewPCG(d.o.Seed, 0)),
		holdAt:  now.Add(300 * time.Millisecond),
		longest: min(2*time.Second, d.o.For/3),
	}
	var all sync.WaitGroup
	for n := range d.o.Producers {
		all.Go(func() {
			(&producer{d: d, n: n + 1, pace: p, rng: rand.New(rand.NewPCG(d.o.Seed, uint64(n+1)))}).run(ctx)
		})
	}
	all.Wait()
}

type producer struct {
	d    *demo
	n    int
	pace *pace
	rng  *rand.Rand
}

var errRollback = errors.New("rolled back on purpose")

func (p *producer) run(ctx context.Context) {
	d := p.d
	mean := min(max(d.o.Rate/200, 1), 1000)
	for tx := 1; ; tx++ {
		n := 1 + p.rng.IntN(2*mean-1)
		hold, ok := p.pace.wait(ctx, n)
		if !ok {
			return
		}
		entries := make([]entry, n)
		for i := range entries {
			entries[i] = entry{
				Entry:   fmt.Sprintf("p%d-%d-%d", p.n, tx, i),
				Account: fmt.Sprintf("account-%d", 1+p.rng.IntN(200)),
				Cents:   p.rng.Int64N(100_000) - 50_000,
			}
		}
		rollBack := p.rng.IntN(100) < 4 || hold > 0 && p.rng.IntN(6) == 0
		if err := p.transaction(ctx, tx, entries, hold, rollBack); err != nil && d.life.Err() == nil {
			d.state.event("producer %d: %v", p.n, err)
			pause(ctx, 500*time.Millisecond)
		}
	}
}

// transaction books entries and produces a message of each, all or none.
//
// Whether they exist is not for the producer to say: the database is asked at the end.
func (p *producer) transaction(ctx context.Context, tx int, entries []entry, hold time.Duration, rollBack bool) error {
	d := p.d
	call, cancel := context.WithTimeout(d.life, hold+20*time.Second)
	defer cancel()
	var (
		held     time.Duration
		overtook int64
		stored   []weir.Produced
	)
	err := pgx.BeginTxFunc(call, d.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(t pgx.Tx) (err error) {
		messages := make([]weir.Message, len(entries))
		names, accounts, cents := make([]string, len(entries)), make([]string, len(entries)), make([]int64, len(entries))
		for i, e := range entries {
			messages[i] = weir.Message{Key: e.Account, Payload: e}
			names[i], accounts[i], cents[i] = e.Entry, e.Account, e.Cents
			d.rec.ProduceStarted(d.topic, e.Entry, e.Account)
		}
		if stored, err = d.c.ProduceTx(call, t, d.topic, messages...); err != nil {
			return err
		}
		ids := make([]int64, len(stored))
		for i, s := range stored {
			ids[i] = s.ID
		}
		if _, err := t.Exec(call, d.text("ledger_book"), p.n, tx, names, accounts, cents, ids); err != nil {
			return err
		}
		if hold > 0 {
			began, before := time.Now(), d.committed.Load()
			d.state.hold(p.n, began)
			pause(ctx, hold)
			d.state.hold(p.n, time.Time{})
			held, overtook = time.Since(began), d.committed.Load()-before
		}
		if rollBack {
			return errRollback
		}
		for _, name := range names {
			d.rec.Committing(name)
		}
		return nil
	})
	switch {
	case errors.Is(err, errRollback):
		for _, e := range entries {
			d.rec.ProduceFailed(e.Entry)
		}
	case err != nil:
		for _, e := range entries {
			d.rec.ProduceUnknown(e.Entry)
		}
		return err
	default:
		for i, e := range entries {
			d.rec.Produced(d.topic, stored[i].ID, e.Entry, e.Account)
		}
		d.committed.Add(int64(len(entries)))
		d.c.Wake(d.topic)
	}
	if hold > 0 {
		d.state.held(p.n, held, overtook, rollBack)
	}
	return nil
}
