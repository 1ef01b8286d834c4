package torture

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

// topicSpec is one of the topics, which differ in what reads them.
type topicSpec struct {
	name  string
	mode  weir.Mode
	share float64 // of all messages
	batch int     // messages of a transaction, on average
	keys  int     // of an era
	loops int     // transactions at once, of each producer
}

var topics = []topicSpec{
	{"weir_torture_stream", weir.Stream, 0.87, 250, 500, 3},
	{"weir_torture_ordered", weir.Ordered, 0.08, 40, 300, 2},
	{"weir_torture_queue", weir.Queue, 0.05, 20, 300, 1},
}

// groupSpec is one of the groups.
type groupSpec struct {
	name        string
	topic       int
	once        bool // its handlers write their effect in the transaction that acknowledges
	concurrency int
	batch       int
}

var groups = []groupSpec{
	{"stream", 0, false, 2, 400},
	{"stream-once", 0, true, 2, 400},
	{"ordered", 1, false, 3, 40},
	{"ordered-once", 1, true, 3, 40},
	{"queue", 2, false, 3, 20},
	{"queue-once", 2, true, 3, 20},
}

const lease = 2 * time.Second

// spec is what a process is told, on its standard input.
type spec struct {
	DSN, Schema, Folder string
	Proxy               string // the address of the proxy to go through, "" for none
	Base                int64  // of the clock, in microseconds
	Proc                int64
	Seed                uint64
	Era                 time.Duration
	Group               int     // of a consumer; -1 for a producer
	Rate                float64 // of a producer, messages a second
}

func (s *spec) name() string {
	if s.Group < 0 {
		return fmt.Sprintf("torture producer %d", s.Proc)
	}
	return fmt.Sprintf("torture consumer %d", s.Proc)
}

func recordPath(folder string, proc int64) string {
	return filepath.Join(folder, fmt.Sprintf("process-%d.record", proc))
}

// tally is what a process tells once a second, of itself so far.
type tally struct {
	Produced, Handled, Strays, Errors int64
	Last                              string // error
}

// payload is that of every message.
type payload struct {
	V int64  `json:"v"`
	W string `json:"w"`
}

var padding = strings.Repeat("weir ", 10)

// Child is a process of a torture: it reads what to do from in, tells of itself to out, and goes on until in ends, as it does when
// the process that writes to it has died.
func Child(ctx context.Context, in io.Reader, out io.Writer) error {
	var s spec
	lines := bufio.NewReader(in)
	if first, err := lines.ReadBytes('\n'); err != nil {
		return fmt.Errorf("read what to do from the standard input: %w", err)
	} else if err := json.Unmarshal(first, &s); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &child{spec: s}
	c.rate.Store(int64(s.Rate))
	go func() {
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				break
			}
			var rate int64
			if _, err := fmt.Sscanf(line, "rate %d", &rate); err == nil {
				c.rate.Store(rate)
			}
		}
		cancel()
		time.Sleep(2 * patience)
		os.Exit(1) // the server may be gone as well, and nobody waits
	}()
	config, err := pgxpool.ParseConfig(s.DSN)
	if err != nil {
		return err
	}
	config.ConnConfig.RuntimeParams["application_name"] = s.name()
	config.ConnConfig.ConnectTimeout = 5 * time.Second
	config.MaxConns = 6
	if s.Proxy != "" {
		var d net.Dialer
		config.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "tcp", s.Proxy) }
		config.ConnConfig.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	}
	if c.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	if c.weir, err = weir.New(c.pool, &weir.Options{Schema: s.Schema, Logger: slog.New(slog.DiscardHandler), ProduceRetry: time.Minute}); err != nil {
		return err
	}
	if c.rec, err = newRecorder(recordPath(s.Folder, s.Proc), s.Base, s.Proc); err != nil {
		return err
	}
	var telling sync.WaitGroup
	told := make(chan struct{})
	telling.Go(func() {
		e := json.NewEncoder(out)
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for more := true; more; {
			select {
			case <-t.C:
			case <-told:
				more = false
			}
			c.mu.Lock()
			tally := c.tally
			c.mu.Unlock()
			if e.Encode(tally) != nil {
				return
			}
		}
	})
	if s.Group < 0 {
		c.produce(ctx)
	} else {
		err = c.consume(ctx)
	}
	close(told)
	telling.Wait()
	return errors.Join(err, c.rec.err)
}

type child struct {
	spec
	pool *pgxpool.Pool
	weir *weir.Client
	rec  *recorder
	rate atomic.Int64
	seq  atomic.Int64

	mu    sync.Mutex
	tally tally
}

func (c *child) count(change func(t *tally)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.tally)
}

func (c *child) failed(err error) {
	c.count(func(t *tally) { t.Errors++; t.Last = err.Error() })
}

// produce runs transactions side by side until ctx ends.
func (c *child) produce(ctx context.Context) {
	var all sync.WaitGroup
	for t, spec := range topics {
		for loop := range spec.loops {
			rng := rand.New(rand.NewPCG(c.Seed, uint64(c.Proc)<<16|uint64(t)<<8|uint64(loop)))
			all.Go(func() {
				next := time.Now()
				for ctx.Err() == nil {
					n := 1 + rng.IntN(2*spec.batch-1)
					rate := max(1, float64(c.rate.Load())*spec.share/float64(spec.loops))
					// What was missed is made up for, but not in one burst.
					if late := time.Now().Add(-5 * time.Second); next.Before(late) {
						next = late
					}
					next = next.Add(time.Duration(float64(n) / rate * float64(time.Second)))
					pause(ctx, time.Until(next))
					if ctx.Err() == nil {
						c.transaction(ctx, t, n, rng)
					}
				}
			})
		}
	}
	all.Wait()
}

// transaction produces n messages and notes them in the ledger, or produces them by Produce, which repeats by itself.
func (c *child) transaction(ctx context.Context, topic, n int, rng *rand.Rand) {
	own, rollBack := rng.IntN(8) == 0, rng.IntN(25) == 0
	hold := time.Duration(0)
	switch r := rng.IntN(100); {
	case r < 1:
		hold = time.Duration(rng.Int64N(int64(time.Second)))
	case r < 20:
		hold = time.Duration(rng.Int64N(int64(50 * time.Millisecond)))
	}
	slow := rng.IntN(20) == 0 // a clock that is ten minutes slow says when to deliver

	first := makeValue(c.rec.now()/c.Era.Microseconds(), c.Proc, c.seq.Add(int64(n))-int64(n))
	e := entry{where: int64(topic), own: own, items: make([]item, n)}
	messages := make([]weir.Message, n)
	for i := range n {
		v := first + int64(i)
		e.items[i].value = v
		messages[i] = weir.Message{Key: keyOf(topic, v), Payload: payload{V: v, W: padding[:mix(v)%50]}}
		if slow {
			messages[i].DeliverAt = time.Now().Add(-10 * time.Minute)
		}
	}
	say := func(kind int) bool {
		e.kind = kind
		return c.rec.add(e) == nil
	}
	if !say(entryStarted) {
		return
	}
	note := func(produced []weir.Produced) {
		for i, p := range produced {
			e.items[i].id = p.ID
		}
		say(entryProduced)
		c.count(func(t *tally) { t.Produced += int64(n) })
	}
	name := topics[topic].name
	life := context.WithoutCancel(ctx)
	if own {
		call, cancel := context.WithTimeout(life, 90*time.Second)
		defer cancel()
		stop := context.AfterFunc(ctx, func() { time.AfterFunc(15*time.Second, cancel) })
		defer stop()
		say(entryCommit)
		produced, err := c.weir.Produce(call, name, messages...)
		switch {
		case err == nil:
			note(produced)
		case errors.Is(err, weir.ErrUnknownOutcome):
			say(entryUnknown)
		default:
			say(entryFailed)
		}
		if err != nil {
			c.failed(err)
		}
		return
	}
	call, cancel := context.WithTimeout(life, hold+5*time.Second)
	defer cancel()
	produced, committing, err := c.inTransaction(call, topic, messages, first, hold, rollBack, func() { say(entryCommit) })
	switch {
	case err == nil && !rollBack:
		note(produced)
		c.weir.Wake(name)
	case committing:
		say(entryUnknown)
	default:
		say(entryFailed)
	}
	if err != nil {
		c.failed(err)
		pause(ctx, 50*time.Millisecond)
	}
}

func (c *child) inTransaction(
	ctx context.Context, topic int, messages []weir.Message, first int64, hold time.Duration, rollBack bool, commits func(),
) (produced []weir.Produced, committing bool, err error) {
	tx, err := c.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, false, err
	}
	defer func() { _ = tx.Rollback(ctx) }() // without effect after a commit
	if produced, err = c.weir.ProduceTx(ctx, tx, topics[topic].name, messages...); err != nil {
		return nil, false, err
	}
	ids := make([]int64, len(produced))
	for i, p := range produced {
		ids[i] = p.ID
	}
	if _, err := tx.Exec(ctx, text(c.Schema, "ledger_add"), topic, first, ids); err != nil {
		return nil, false, err
	}
	pause(ctx, hold)
	if rollBack {
		return nil, false, nil
	}
	commits()
	return produced, true, tx.Commit(ctx)
}

// Fates of messages, by their values: most are handled at once.
func failures(value int64, topic int) int64 {
	x := mix(value ^ 0x5bd1e995)
	every := uint64(150)
	if topic == 0 {
		every = 20_000
	}
	if x%every == 0 {
		return 1 + int64(x>>32%2)
	}
	return 0
}

func hopeless(value int64) bool { return mix(value^0x2545f491)%30_000 == 0 }

var errStray = errors.New("the message is under no lease of this consumer")

// consume runs the consumer of a group until ctx ends.
func (c *child) consume(ctx context.Context) error {
	g := groups[c.Group]
	name := c.name()
	group, err := c.groupID(ctx)
	if err != nil {
		return err
	}
	handle := func(ctx context.Context, tx pgx.Tx, messages []*weir.Received[payload]) error {
		entered := c.rec.now()
		ids, attempts := make([]int64, len(messages)), make([]int32, len(messages))
		for i, m := range messages {
			ids[i], attempts[i] = m.ID, int32(m.Attempt)
		}
		rows, err := c.pool.Query(ctx, text(c.Schema, "held"), group, name, ids, attempts)
		if err != nil {
			return err
		}
		leases, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		all := entry{kind: entryBegin, where: int64(c.Group), time: entered}
		strays := entry{kind: entryWithout, where: int64(c.Group), time: entered}
		failed := &weir.BatchError{Failed: map[int]error{}}
		var dead entry
		dead.kind, dead.where = entryGivenUp, int64(c.Group)
		effect := struct {
			ids, vals []int64
			leases    []string
		}{}
		for i, m := range messages {
			it := item{value: m.Value.V, id: m.ID, attempt: int64(m.Attempt), lease: leases[i]}
			if m.Key != keyOf(g.topic, m.Value.V) {
				it.wrongKey = m.Key
			}
			if leases[i] == "" {
				strays.items = append(strays.items, it)
				failed.Failed[i] = errStray
				continue
			}
			switch {
			case hopeless(it.value):
				failed.Failed[i] = weir.Dead(errors.New("hopeless"))
				dead.items = append(dead.items, it)
			case it.attempt <= failures(it.value, g.topic):
				failed.Failed[i] = errors.New("not now")
			default:
				it.ok = true
				effect.ids, effect.vals = append(effect.ids, it.id), append(effect.vals, it.value)
				effect.leases = append(effect.leases, it.lease)
			}
			all.items = append(all.items, it)
		}
		if err := c.rec.add(strays); err != nil {
			return err
		}
		if err := c.rec.add(all); err != nil {
			return err
		}
		// With a transaction the effect is the good end; what a process says of it counts only where there is none.
		if tx != nil {
			for i := range all.items {
				all.items[i].ok = false
			}
		}
		all.kind, all.time = entryEnd, 0
		if tx != nil && len(failed.Failed) == 0 {
			if _, err = tx.Exec(ctx, text(c.Schema, "effect_add"), c.Group, c.Proc, effect.ids, effect.vals, effect.leases); err != nil {
				_ = c.rec.add(all)
				return err
			}
		}
		if ctx.Err() != nil {
			for i := range all.items {
				all.items[i].ok = false
			}
		}
		if err := errors.Join(c.rec.add(dead), c.rec.add(all)); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		c.count(func(t *tally) {
			t.Handled += int64(len(effect.ids))
			t.Strays += int64(len(strays.items))
		})
		if len(failed.Failed) > 0 {
			return failed
		}
		return nil
	}
	h := weir.HandleBatch(func(ctx context.Context, messages []*weir.Received[payload]) error { return handle(ctx, nil, messages) })
	if g.once {
		h = weir.HandleBatchTx(handle)
	}
	for {
		k, err := c.weir.NewConsumer(topics[g.topic].name, g.name, h, &weir.ConsumerOptions{
			Name: name, Concurrency: g.concurrency, BatchSize: g.batch, Lease: lease, PollInterval: 500 * time.Millisecond,
			HandlerTimeout: 10 * time.Second, StopTimeout: 5 * time.Second, BlockedAfter: -1,
		})
		if err != nil {
			return err
		}
		err = k.Run(ctx)
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if !weir.CanRetry(err) {
			return err
		}
		c.failed(err)
		pause(ctx, 200*time.Millisecond)
	}
}

// groupID asks until the server answers.
func (c *child) groupID(ctx context.Context) (id int32, err error) {
	g := groups[c.Group]
	for {
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		err = c.pool.QueryRow(call, text(c.Schema, "group_id"), topics[g.topic].name, g.name).Scan(&id)
		cancel()
		if err == nil || ctx.Err() != nil || errors.Is(err, pgx.ErrNoRows) {
			return id, err
		}
		pause(ctx, 100*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
