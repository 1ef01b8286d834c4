package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:     "cursorbench",
		Short:    "an idle poll and a fresh claim at 1, 10, 41 and 500 segments, in microseconds and round trips, against select 1",
		Settings: compared,
		Run:      cursorbench,
		Plots:    []Plot{{Title: "By number of segments", Figures: []string{"idle poll", "claim", "select 1"}}},
	})
}

const cursorSegment = 1000 // ids

// cursorbench measures what a group costs that has nothing to do, and what a claim costs: neither may depend on how long the log is.
func cursorbench(ctx context.Context, e *Env) error {
	sizes := []int{1, 10, 41, 500}
	if e.Size == Quick {
		sizes = []int{1, 60}
	}
	most := sizes[len(sizes)-1]
	polls, claims := e.Runs(2000, 200), e.Runs(800, 100)
	e.Parameter("ids a segment", cursorSegment)
	e.Parameter("polls", polls)
	e.Parameter("claims", claims)
	e.Parameter("messages a claim", 1)
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
	}
	lost := 0
	for range e.Runs(5, 1) {
		poll, claim := map[int]float64{}, map[int]float64{}
		for i, l := range logs {
			n := sizes[i]
			name := fmt.Sprintf("%d segments", n)
			if n == 1 {
				name = "1 segment"
			}
			polled, ones, err := l.poll(ctx, polls)
			if err != nil {
				return fmt.Errorf("%s: poll: %w", name, err)
			}
			m, err := l.claim(ctx, claims)
			if err != nil {
				return fmt.Errorf("%s: claim: %w", name, err)
			}
			lost += m.missed
			poll[n], claim[n] = microseconds(quantile(polled, 0.5)), microseconds(quantile(m.took, 0.5))
			one := microseconds(quantile(ones, 0.5))
			e.Record("idle poll, "+name, "us", poll[n])
			e.Record("claim, "+name, "us", claim[n])
			e.Record("select 1, "+name, "us", one)
			e.Record("round trips of a poll, "+name, "trips", l.trips)
			e.Record("round trips of a claim, "+name, "trips", m.trips)
			if n == most {
				e.Record("idle poll against select 1", "x", poll[n]/one)
				e.Record("round trips of a claim", "trips", m.trips)
				e.Record(fmt.Sprintf("idle poll at %d segments against 1", n), "x", poll[n]/poll[1])
				e.Record(fmt.Sprintf("claim at %d segments against 1", n), "x", claim[n]/claim[1])
			}
		}
	}
	account{"weir": lost}.close(e)
	e.AtMost("idle poll against select 1", 2.5)
	// Now and then a sign of life is given.
	e.AtMost("round trips of a claim", 2.02)
	e.AtMost(fmt.Sprintf("idle poll at %d segments against 1", most), 1.1)
	e.AtMost(fmt.Sprintf("claim at %d segments against 1", most), 1.1)
	return nil
}

// cursorLog is a topic of some length, whose group has handled all of it.
type cursorLog struct {
	pool   *pgxpool.Pool
	client *weir.Client
	wire   *wire
	tracer *tracer
	last   int64 // the highest id of the last full segment
	trips  float64
	// what a consumer sends that has nothing to do
	statement string
	args      []any
}

func newCursorLog(ctx context.Context, e *Env, segments int) (*cursorLog, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, err
	}
	l := &cursorLog{wire: &wire{}, tracer: &tracer{}, last: int64(segments) * cursorSegment}
	l.pool, err = l.wire.pool(ctx, dsn, consumerConns, nil, func(c *pgxpool.Config) { c.ConnConfig.Tracer = l.tracer })
	if err != nil {
		return nil, err
	}
	if l.client, err = weir.New(l.pool, &weir.Options{NoListen: true, Logger: quiet()}); err != nil {
		return nil, err
	}
	if err := l.client.Migrate(ctx); err != nil {
		return nil, err
	}
	if err := l.client.CreateTopic(ctx, "orders", &weir.TopicOptions{SegmentSize: cursorSegment}); err != nil {
		return nil, err
	}
	message := weir.Message{Payload: json.RawMessage(`{"order":4711,"customer":"c-000042","amount":12.5,"currency":"EUR"}`)}
	_, err = l.client.Copy(ctx, "orders", func(yield func(weir.Message, error) bool) {
		for range l.last {
			if !yield(message, nil) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if err := l.client.CreateGroup(ctx, "orders", "billing", &weir.GroupOptions{Start: weir.Head()}); err != nil {
		return nil, err
	}
	// The consumer polls for a while, and what it sends most is the poll.
	k, err := l.client.NewConsumer("orders", "billing", weir.Handle(func(context.Context, *weir.Received[[]byte]) error { return nil }),
		&weir.ConsumerOptions{PollInterval: 10 * time.Millisecond})
	if err != nil {
		return nil, err
	}
	running, stop := context.WithTimeout(ctx, 300*time.Millisecond)
	defer stop()
	var before, sent int64
	l.tracer.begin()
	settle := time.AfterFunc(100*time.Millisecond, func() { before, sent = l.wire.trips.Load(), l.tracer.count() })
	defer settle.Stop()
	var trips, polls int64
	measured := time.AfterFunc(280*time.Millisecond, func() { trips, polls = l.wire.trips.Load()-before, l.tracer.count()-sent })
	defer measured.Stop()
	if err := k.Run(running); err != nil {
		return nil, err
	}
	if polls == 0 {
		return nil, fmt.Errorf("an idle consumer sent nothing")
	}
	l.trips = float64(trips) / float64(polls)
	l.statement, l.args = l.tracer.most()
	l.pool.Reset() // the session that wrote the log has caches of all its segments, as hardly a consumer's has
	return l, nil
}

func (l *cursorLog) close() {
	l.client.Close()
	l.pool.Close()
}

// poll repeats what an idle consumer sends, in turn with "select 1" on the same connection, and returns how long each took, in rising
// order.
func (l *cursorLog) poll(ctx context.Context, n int) (polls, ones []time.Duration, err error) {
	conn, err := l.pool.Acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer conn.Release()
	send := func(statement string, args ...any) (time.Duration, error) {
		began := time.Now()
		rows, err := conn.Query(ctx, statement, args...)
		if err != nil {
			return 0, err
		}
		rows.Close()
		return time.Since(began), rows.Err()
	}
	for i := range n + 20 {
		polled, err := send(l.statement, l.args...)
		if err != nil {
			return nil, nil, err
		}
		one, err := send("select 1")
		if err != nil {
			return nil, nil, err
		}
		if i >= 20 { // plans are made by then
			polls, ones = append(polls, polled), append(ones, one)
		}
	}
	slices.Sort(polls)
	slices.Sort(ones)
	return polls, ones, nil
}

// claim has the group handle messages of the last segment again, one a claim.
func (l *cursorLog) claim(ctx context.Context, n int) (cycled, error) {
	if _, err := l.client.Seek(ctx, "orders", "billing", weir.AtID(l.last-cursorSegment+1)); err != nil {
		return cycled{}, err
	}
	m, err := cycles(ctx, l.client, l.wire, "orders", "billing", n)
	if err != nil {
		return m, err
	}
	_, err = l.client.Seek(ctx, "orders", "billing", weir.Head()) // where an idle poll finds nothing
	return m, err
}

// tracer remembers what a pool sends.
type tracer struct {
	mu   sync.Mutex
	on   bool
	sent map[string]int
	args map[string][]any
}

func (t *tracer) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.on, t.sent, t.args = true, map[string]int{}, map[string][]any{}
}

func (t *tracer) note(statement string, args []any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.on {
		t.sent[statement]++
		t.args[statement] = args
	}
}

func (t *tracer) count() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, sent := range t.sent {
		n = max(n, sent)
	}
	return int64(n)
}

// most is what was sent the most, with the arguments of the last time. It ends the record.
func (t *tracer) most() (statement string, args []any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.on = false
	for s, n := range t.sent {
		if n > t.sent[statement] {
			statement = s
		}
	}
	return statement, t.args[statement]
}

// TraceQueryStart implements pgx.QueryTracer.
func (t *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	t.note(data.SQL, data.Args)
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (t *tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements pgx.BatchTracer.
func (t *tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		t.note(q.SQL, q.Arguments)
	}
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (t *tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements pgx.BatchTracer.
func (t *tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
