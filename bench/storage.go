package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:     "segments",
		Short:    "an idle poll, a claim and a produce at 5, 41, 500 and 2,000 segments",
		Settings: compared,
		Long:     true,
		Run:      segments,
		Plots:    []Plot{{Title: "By number of segments", Figures: []string{"idle poll", "claim", "produce"}}},
	})
	register(Workload{
		Name:     "bloat",
		Short:    "2,000 messages a second while a repeatable-read transaction stays open, against none",
		Settings: compared,
		Long:     true,
		Run:      bloat,
		Plots:    []Plot{{Title: "Buffers of a poll, under an old snapshot", Figures: []string{"buffers a poll"}}},
	})
	register(Workload{
		Name:     "backlog",
		Short:    "10 million messages that wait: listing groups and claiming, against 10 thousand",
		Settings: compared,
		Long:     true,
		Run:      backlogged,
	})
}

// segments measures what must not depend on how many segments a log has.
func segments(ctx context.Context, e *Env) error {
	sizes := []int{5, 41, 500, 2000}
	if e.Size == Quick {
		sizes = []int{5, 60}
	}
	// Many short rounds, each beginning with another size: what else the machine does for seconds, and what the turn before has
	// left in its caches, is then in all sizes alike.
	rounds, polls, claims, produces := e.Runs(30, 1), e.Runs(1500, 200), e.Runs(100, 100), e.Runs(100, 100)
	e.Parameter("ids a segment", cursorSegment)
	var logs []*cursorLog
	defer func() {
		for _, l := range logs {
			l.close()
		}
		e.dropDatabases(ctx)
	}()
	for _, n := range sizes {
		l, err := newCursorLog(ctx, e, n)
		if err != nil {
			return fmt.Errorf("%d segments: %w", n, err)
		}
		logs = append(logs, l)
		// Or autovacuum goes through the segments meanwhile, the longer the more there are.
		if _, err := l.pool.Exec(ctx, "vacuum (freeze, analyze)"); err != nil {
			return fmt.Errorf("%d segments: %w", n, err)
		}
	}
	lost := 0
	few := sizes[0]
	for round := range rounds {
		took := map[string]map[int]float64{"idle poll": {}, "claim": {}, "produce": {}}
		for turn := range logs {
			i := (round + turn) % len(logs)
			l, n := logs[i], sizes[i]
			name := fmt.Sprintf("%d segments", n)
			polled, _, err := l.poll(ctx, polls)
			if err != nil {
				return fmt.Errorf("%s: poll: %w", name, err)
			}
			m, err := l.claim(ctx, claims)
			if err != nil {
				return fmt.Errorf("%s: claim: %w", name, err)
			}
			lost += m.missed
			// In a topic of its own, or the log would grow: all of them are rolled back.
			var produced []time.Duration
			for range produces {
				tx, err := l.pool.Begin(ctx)
				if err != nil {
					return err
				}
				began := time.Now()
				_, err = l.client.ProduceTx(ctx, tx, "orders", weir.Message{Payload: json.RawMessage(`{"order":4711}`)})
				produced = append(produced, time.Since(began))
				if e := tx.Rollback(ctx); err == nil {
					err = e
				}
				if err != nil {
					return fmt.Errorf("%s: produce: %w", name, err)
				}
			}
			slices.Sort(produced)
			for figure, d := range map[string][]time.Duration{"idle poll": polled, "claim": m.took, "produce": produced} {
				took[figure][n] = microseconds(quantile(d, 0.5))
				e.Record(figure+", "+name, "us", took[figure][n])
			}
		}
		for _, figure := range []string{"idle poll", "claim", "produce"} {
			for _, n := range sizes[1:] {
				e.Record(fmt.Sprintf("%s at %d segments against %d", figure, n, few), "x", took[figure][n]/took[figure][few])
			}
		}
	}
	account{"weir": lost}.close(e)
	for _, figure := range []string{"idle poll", "claim", "produce"} {
		for _, n := range sizes[1:] {
			e.AtMost(fmt.Sprintf("%s at %d segments against %d", figure, n, few), 1.1)
		}
	}
	return nil
}

// bloat has messages flow at a steady rate, first without and then with a snapshot that keeps every version of every row.
func bloat(ctx context.Context, e *Env) error {
	const rate = 2000
	length := e.For(10*time.Minute, 20*time.Second)
	e.Parameter("messages a second", rate)
	e.Parameter("seconds with the snapshot", length.Seconds())
	client, dsn, err := e.Open(ctx, nil)
	if err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "t", nil); err != nil {
		return err
	}
	if err := client.CreateGroup(ctx, "t", "g", nil); err != nil {
		return err
	}
	var handled atomic.Int64
	k, err := client.NewConsumer("t", "g", weir.Handle(func(context.Context, *weir.Received[[]byte]) error {
		handled.Add(1)
		return nil
	}), &weir.ConsumerOptions{Concurrency: 4})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- k.Run(running) }()
	// One process makes the upkeep, more often than a client does by itself, so that a short run has some, too.
	go func() {
		for running.Err() == nil {
			if _, any, err := client.Maintain(running); err != nil || !any {
				wait(running, time.Second)
			}
		}
	}()

	probe, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = probe.Close(context.WithoutCancel(ctx)) }()
	payload := json.RawMessage(`{"order":4711,"customer":"c-000042","amount":12.5,"currency":"EUR"}`)
	// flow gives the rate at which messages were handled, and the buffers of a poll at each tenth.
	flow := func(d time.Duration, name string) (float64, error) {
		before, began := handled.Load(), time.Now()
		next, produced, tenth := began, 0, 1
		for time.Since(began) < d && ctx.Err() == nil {
			batch := make([]weir.Message, rate/20)
			for i := range batch {
				batch[i].Payload = payload
			}
			if _, err := client.Produce(ctx, "t", batch...); err != nil {
				return 0, err
			}
			produced += len(batch)
			if next = next.Add(50 * time.Millisecond); time.Until(next) > 0 {
				wait(ctx, time.Until(next))
			}
			if time.Since(began) > d*time.Duration(tenth)/10 {
				tenth++
				n, err := pollBuffers(ctx, probe)
				if err != nil {
					return 0, err
				}
				e.Record("buffers a poll, "+name, "pages", n)
			}
		}
		took := time.Since(began)
		return float64(handled.Load()-before) / took.Seconds(), context.Cause(ctx)
	}
	alone, err := flow(max(length/10, 5*time.Second), "no snapshot")
	if err != nil {
		return err
	}
	holder, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = holder.Close(context.WithoutCancel(ctx)) }()
	if _, err := holder.Exec(ctx, "begin isolation level repeatable read; select count(*) from weir.topic"); err != nil {
		return err
	}
	held, err := flow(length, "old snapshot")
	if err != nil {
		return err
	}
	e.Record("handled, no snapshot", "messages/s", alone)
	e.Record("handled, old snapshot", "messages/s", held)
	e.Record("rate under an old snapshot against none", "x", held/alone)
	stop()
	if err := <-done; err != nil {
		return err
	}
	e.AtLeast("rate under an old snapshot against none", 0.95)
	// Bounded: it goes up and down with each squeeze, and does not grow with the time that the snapshot is held.
	for _, s := range e.result.Series {
		if s.Name != "buffers a poll, old snapshot" {
			continue
		}
		half := len(s.Values) / 2
		sum := func(values []float64) (total float64) {
			for _, v := range values {
				total += v
			}
			return total / float64(max(1, len(values)))
		}
		grown := sum(s.Values[half:]) / max(1, sum(s.Values[:half]))
		e.Target("buffers of a poll, the second half of that time against the first", "<= 1.5", grown, grown <= 1.5)
		e.Target("most buffers of a poll under an old snapshot", "<= 1000", slices.Max(s.Values), slices.Max(s.Values) <= 1000)
	}
	return nil
}

// pollBuffers is how many buffers a poll touches that takes nothing.
func pollBuffers(ctx context.Context, conn *pgx.Conn) (float64, error) {
	var plan string
	rows, err := conn.Query(ctx, `explain (analyze, buffers, format json)
		select * from weir.poll('t', 'g', 'probe', 0, '15 s', 1, null, true)`)
	if err != nil {
		return 0, err
	}
	if plan, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[string]); err != nil {
		return 0, err
	}
	var parsed []struct {
		Plan struct {
			Hit  float64 `json:"Shared Hit Blocks"`
			Read float64 `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal([]byte(plan), &parsed); err != nil || len(parsed) == 0 {
		return 0, fmt.Errorf("read a plan: %w", err)
	}
	return parsed[0].Plan.Hit + parsed[0].Plan.Read, nil
}

// backlogged compares a group that is ten million messages behind with one that is ten thousand behind.
func backlogged(ctx context.Context, e *Env) error {
	n := e.Runs(10_000_000, 200_000)
	e.Parameter("messages", n)
	client, dsn, err := e.Open(ctx, nil)
	if err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "orders", nil); err != nil {
		return err
	}
	if err := fill(ctx, e, dsn, n); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	for _, g := range []struct {
		name  string
		start weir.Position
	}{{"ten million", weir.Beginning()}, {"ten thousand", weir.AtID(int64(n) - 10_000 + 1)}} {
		if err := client.CreateGroup(ctx, "orders", g.name, &weir.GroupOptions{Start: g.start}); err != nil {
			return err
		}
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for range e.Runs(20, 3) {
		began := time.Now()
		if _, err := client.Groups(ctx, ""); err != nil {
			return err
		}
		e.Record("list groups", "ms", float64(time.Since(began).Microseconds())/1000)
		began = time.Now()
		if _, err := client.Topics(ctx); err != nil {
			return err
		}
		e.Record("list topics", "ms", float64(time.Since(began).Microseconds())/1000)
	}
	for range e.Runs(20, 3) {
		took := map[string]float64{}
		for _, group := range []string{"ten million", "ten thousand"} {
			began := time.Now()
			var lease int64
			err := conn.QueryRow(ctx, "select lease_id from weir.claim('orders', $1, 'bench')", group).Scan(&lease)
			if err != nil {
				return err
			}
			took[group] = microseconds(time.Since(began))
			if _, err := conn.Exec(ctx, "select weir.ack($1, 'bench')", lease); err != nil {
				return err
			}
			e.Record("claim, "+group, "us", took[group])
		}
		e.Record("claim, ten million against ten thousand", "x", took["ten million"]/took["ten thousand"])
	}
	e.AtMost("list groups", 100)
	e.AtMost("list topics", 100)
	e.AtMost("claim, ten million against ten thousand", 1.2)
	return nil
}

// wait waits, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
