package weir_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/history"
	"github.com/weirhq/weir/internal/pgtest"
)

// seeded gives the seed of a randomized test: WEIR_SEED, or a new one, which it prints. What the test decides follows from it;
// how processes and the server come in each other's way does not.
func seeded(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("WEIR_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("WEIR_SEED: %v", err)
		}
	}
	fmt.Printf("%s: replay with WEIR_SEED=%d\n", t.Name(), seed)
	return seed
}

// process is this test binary at work as another process, until its standard input ends.
type process struct {
	*exec.Cmd
	in    io.Closer
	ended chan struct{}
	err   error
}

// launch starts a child. It is killed at the test's end.
func launch(t *testing.T, name string, env ...string) *process {
	t.Helper()
	p := &process{Cmd: child(t, name, env...), ended: make(chan struct{})}
	var err error
	if p.in, err = p.StdinPipe(); err == nil {
		err = p.Start()
	}
	if err != nil {
		t.Errorf("start child %s: %v", name, err)
		close(p.ended)
		return p
	}
	go func() {
		p.err = p.Wait()
		close(p.ended)
	}()
	t.Cleanup(p.kill)
	return p
}

func (p *process) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// kill ends a process without a warning.
func (p *process) kill() {
	if p.alive() {
		_ = p.Process.Kill()
		<-p.ended
	}
}

// suspend stops a process for a while, as a virtual machine is stopped that is moved.
func (p *process) suspend(d time.Duration) {
	_ = p.Process.Signal(syscall.SIGSTOP)
	time.Sleep(d)
	_ = p.Process.Signal(syscall.SIGCONT)
}

// stop asks a process to stop, and waits for it.
func (p *process) stop() error {
	_ = p.in.Close()
	select {
	case <-p.ended:
		return p.err
	case <-time.After(30 * time.Second):
		p.kill()
		return errors.New("it did not stop within 30 s")
	}
}

// told gives a child the context that ends when it is asked to stop, or its parent has died.
func told() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
		time.Sleep(25 * time.Second)
		os.Exit(4)
	}()
	return ctx
}

// childClient opens a client in a child.
func childClient(ctx context.Context, connections int32) (*weir.Client, *pgxpool.Pool) {
	config, err := pgxpool.ParseConfig(os.Getenv("DSN"))
	if err != nil {
		childFail(err)
	}
	config.MaxConns = connections
	config.ConnConfig.RuntimeParams["application_name"] = os.Getenv("NAME")
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		childFail(err)
	}
	c, err := weir.New(pool, &weir.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		childFail(err)
	}
	return c, pool
}

// tortured is the payload of a message of TestOrderedTorture.
type tortured struct {
	Value string
	Fail  int    // how often its handler fails
	Dead  string // "now" or "late": its handler never succeeds
}

// witness records in the database what a consumer of TestOrderedTorture does, by the server's clock.
type witness struct {
	pool     *pgxpool.Pool
	consumer string
}

// begin records that messages are about to be handled, and under which lease of this consumer's; failures is how often each has failed.
// It is an error where one of them is not under a lease.
func (w *witness) begin(ctx context.Context, messages []*weir.Received[tortured]) (failures []int, err error) {
	ids, attempts := make([]int64, len(messages)), make([]int, len(messages))
	for i, m := range messages {
		ids[i], attempts[i] = m.ID, m.Attempt
	}
	rows, err := w.pool.Query(ctx, "select message, lease, failures from begin_handling($1, $2, $3)", w.consumer, ids, attempts)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	failures = make([]int, len(messages))
	stray := false
	for rows.Next() {
		var (
			id    int64
			lease *int64
			n     int
		)
		if err := rows.Scan(&id, &lease, &n); err != nil {
			return nil, err
		}
		failures[slices.Index(ids, id)] = n
		stray = stray || lease == nil
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if stray {
		return nil, errors.New("the lease was lost")
	}
	return failures, nil
}

// end records how the handling of messages ended, in q.
func (w *witness) end(ctx context.Context, q querier, event string, messages ...*weir.Received[tortured]) error {
	for _, m := range messages {
		if _, err := q.Exec(ctx, "select end_handling($1, $2, $3, $4)", w.consumer, m.ID, m.Attempt, event); err != nil {
			return err
		}
	}
	return nil
}

// handle is the handler of all consumers of TestOrderedTorture. q is where a good end is recorded: with a transaction, it is the effect.
func (w *witness) handle(ctx context.Context, q querier, messages []*weir.Received[tortured]) error {
	failures, err := w.begin(ctx, messages)
	if err != nil {
		return err
	}
	d := time.Duration(rand.Int64N(int64(10 * time.Millisecond)))
	if rand.IntN(50) == 0 {
		d = 100*time.Millisecond + time.Duration(rand.Int64N(int64(300*time.Millisecond)))
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	failed := &weir.BatchError{Failed: map[int]error{}}
	var good, bad []*weir.Received[tortured]
	for i, m := range messages {
		switch {
		case m.Value.Dead == "now":
			failed.Failed[i] = weir.Dead(errors.New("no use"))
		case m.Value.Dead == "late":
			failed.Failed[i] = errors.New("never")
		case failures[i] < m.Value.Fail:
			failed.Failed[i] = errors.New("not now")
		default:
			good = append(good, m)
			continue
		}
		bad = append(bad, m)
	}
	if err := w.end(ctx, w.pool, "failed", bad...); err != nil {
		return err
	}
	if len(bad) > 0 && q != querier(w.pool) {
		// The transaction is rolled back; the good ones begin once more.
		if err := w.end(ctx, w.pool, "undone", good...); err != nil {
			return err
		}
		return failed
	}
	event := "good"
	if q != querier(w.pool) {
		event = "effect"
	}
	if err := w.end(ctx, q, event, good...); err != nil {
		return err
	}
	if len(bad) > 0 {
		return failed
	}
	return nil
}

func init() {
	// Consumes topic t as the ordered group g, in the way that HOW says.
	children["tortured"] = func() {
		ctx := told()
		c, pool := childClient(ctx, 6)
		config, err := pgxpool.ParseConfig(os.Getenv("DSN"))
		if err != nil {
			childFail(err)
		}
		config.MaxConns = 4
		records, err := pgxpool.NewWithConfig(context.Background(), config)
		if err != nil {
			childFail(err)
		}
		w := &witness{pool: records, consumer: os.Getenv("NAME")}
		one := func(err error) error {
			var some *weir.BatchError
			if errors.As(err, &some) {
				return some.Failed[0]
			}
			return err
		}
		type batch = []*weir.Received[tortured]
		h := map[string]weir.Handler{
			"single": weir.Handle(func(ctx context.Context, m *weir.Received[tortured]) error {
				return one(w.handle(ctx, records, batch{m}))
			}),
			"batch": weir.HandleBatch(func(ctx context.Context, messages batch) error {
				return w.handle(ctx, records, messages)
			}),
			"single in a transaction": weir.HandleTx(func(ctx context.Context, tx pgx.Tx, m *weir.Received[tortured]) error {
				return one(w.handle(ctx, tx, batch{m}))
			}),
			"batch in a transaction": weir.HandleBatchTx(func(ctx context.Context, tx pgx.Tx, messages batch) error {
				return w.handle(ctx, tx, messages)
			}),
		}[os.Getenv("HOW")]
		k, err := c.NewConsumer("t", "g", h, &weir.ConsumerOptions{
			Name: w.consumer, Concurrency: 8, BatchSize: 10, Lease: time.Second, PollInterval: 100 * time.Millisecond,
		})
		if err != nil {
			childFail(err)
		}
		if err := k.Run(ctx); err != nil {
			childFail(err)
		}
		c.Close()
		pool.Close()
		records.Close()
	}
}

// Eight consumer processes of an ordered group are started, stopped, killed and suspended at random for longer than their
// leases while producers with overlapping transactions go on and some handlings fail. Per key the messages are handled in id
// order and one at a time, none is lost, and none is handled again but for a lease that was lost before its end.
//
// What "one at a time" means for a process that is suspended in the middle of a handler: when it goes on, its lease is another's,
// and no log can stop the handler before it finds out. Such a handling is told apart by the record, never by a guess about
// time. Each handling is recorded by the server, with its clock, when it begins and when it ends, before the handler returns. The
// statement that records a beginning looks up the lease: the one of this consumer's that has the message in this attempt and has
// not expired. The number of an attempt tells leases apart that the same consumer had of the same message. A trigger
// records of every lease when it expired for good, or was acknowledged. Then
//
//   - a handling that found no lease when it began is a stray, and so is what was left of one when its lease expired: it neither
//     keeps the key from others nor lets the next message begin;
//   - every other one counts from its beginning to its end, or to the end of its lease where its process died. No two of a key
//     that count may overlap, whoever has them, and no message may begin before the earlier ones of its key are done;
//   - after a lost lease a consumer may go back to a message that was handled, but then what follows it in its key comes again
//     too: the last handlings of the messages are in order;
//   - half of the consumers write the good end of a handling in the transaction that acknowledges it. It must be there once,
//     and nothing may be handled after it.
//
// Strays are bounded: a consumer begins nothing once its own clock says that its lease is over, so each time that a process
// is suspended, at most the handlers that were just about to begin.
func TestOrderedTorture(t *testing.T) {
	t.Parallel()
	const (
		slots = 8
		keys  = 200
	)
	seed := seeded(t)
	lasts := 30 * time.Second
	if os.Getenv("WEIR_LONG") != "" {
		lasts = 10 * time.Minute
	}
	if s := os.Getenv("WEIR_TORTURE"); s != "" {
		var err error
		lasts, err = time.ParseDuration(s)
		noError(t, err)
	}
	s := pgtest.New(t, &pgtest.Options{Fast: true})
	c, dsn := openOn(t, s, nil)
	topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000}, &weir.GroupOptions{
		Mode: weir.Ordered, MaxAttempts: 12, RetryDelay: 20 * time.Millisecond, RetryMax: 200 * time.Millisecond, SplitAfter: 1,
	})
	conn := connect(t, dsn)
	execute(t, conn, `
		create table record (
		    seq bigserial primary key, at timestamptz not null, event text not null, consumer text not null, message bigint not null,
		    attempt int not null, lease bigint
		);
		create index on record (message);
		create table lease_ended (lease bigint primary key, at timestamptz not null, expired timestamptz not null, how text not null);

		create function begin_handling(consumer text, ids bigint[], attempts int[])
		returns table (message bigint, lease bigint, failures bigint)
		language sql
		begin atomic
		    with m as (select id, attempt from unnest(ids, attempts) as m (id, attempt)),
		    begun as (
		        insert into record (event, consumer, message, attempt, lease, at)
		        select 'begin', begin_handling.consumer, m.id, m.attempt, l.id, clock_timestamp()
		        from m
		        left join lateral (
		            select l.id
		            from weir.lease as l
		            where l.consumer = begin_handling.consumer and l.expires_at > clock_timestamp()
		              and m.attempt = l.attempt + case
		                  when m.id = any (l.ids) and m.id <> all (coalesce(l.done, '{}')) then 0
		                  when m.id = any (l.retries)
		                  then (select d.attempt from weir.delivery as d where d.group_id = l.group_id and d.message_id = m.id)
		              end
		        ) as l on true
		        returning message, lease
		    )
		    select b.message, b.lease, (select count(*) from record as r where r.message = b.message and r.event = 'failed')
		    from begun as b;
		end;

		-- The lease is that of the last beginning: a consumer does not begin a message again in the same attempt before it has ended it.
		create function end_handling(consumer text, id bigint, attempt int, event text) returns void
		language sql
		begin atomic
		    insert into record (event, consumer, message, attempt, lease, at)
		    select end_handling.event, end_handling.consumer, end_handling.id, end_handling.attempt,
		        (
		            select r.lease from record as r
		            where r.message = end_handling.id and r.consumer = end_handling.consumer and r.attempt = end_handling.attempt
		              and r.event = 'begin'
		            order by r.seq desc limit 1
		        ),
		        clock_timestamp();
		end;

		create function note_lease() returns trigger
		language plpgsql
		as $$
		begin
		    if tg_op = 'DELETE' then
		        insert into public.lease_ended values (
		            old.id, clock_timestamp(), old.expires_at, case when old.expires_at > clock_timestamp() then 'acknowledged' else 'split' end
		        );
		    elsif old.id <> new.id then
		        insert into public.lease_ended values (old.id, clock_timestamp(), old.expires_at, 'taken over');
		    end if;
		    return null;
		end
		$$;
		create trigger note_lease after update or delete on weir.lease for each row execute function note_lease();`)

	rec := history.New()
	began := time.Now()
	var faults struct{ stopped, killed, suspended, started atomic.Int64 }
	producing, enough := context.WithCancel(t.Context())
	defer enough()
	var producers, controllers sync.WaitGroup
	for n := range 4 {
		rng := rand.New(rand.NewPCG(seed, uint64(100+n)))
		producers.Go(func() { torturedProducer(producing, t, c, dsn, rec, n, keys, rng) })
	}
	hows := []string{"single", "batch", "single in a transaction", "batch in a transaction"}
	stopping := make(chan struct{})
	for slot := range slots {
		rng := rand.New(rand.NewPCG(seed, uint64(slot)))
		controllers.Go(func() {
			between := func(low, high time.Duration) time.Duration { return low + time.Duration(rng.Int64N(int64(high-low))) }
			for life := 0; !t.Failed(); life++ {
				p := launch(t, "tortured", "DSN="+dsn, "HOW="+hows[slot%len(hows)], fmt.Sprintf("NAME=c%d-%d", slot, life))
				faults.started.Add(1)
				for p.alive() {
					left := lasts - time.Since(began)
					if left <= 0 {
						break
					}
					select {
					case <-time.After(min(left, between(200*time.Millisecond, 4*time.Second))):
					case <-p.ended:
						t.Errorf("a consumer ended by itself: %v", p.err)
						return
					}
					if time.Since(began) >= lasts {
						break
					}
					switch n := rng.IntN(10); {
					case n < 3:
						faults.killed.Add(1)
						p.kill()
					case n < 5:
						faults.stopped.Add(1)
						if err := p.stop(); err != nil {
							t.Errorf("stop a consumer: %v", err)
						}
					default:
						faults.suspended.Add(1)
						p.suspend(between(time.Second, 2500*time.Millisecond))
					}
				}
				if p.alive() { // to the end
					select {
					case <-stopping:
						if err := p.stop(); err != nil {
							t.Errorf("stop a consumer: %v", err)
						}
					case <-p.ended:
						t.Errorf("a consumer ended by itself: %v", p.err)
					}
					return
				}
				if rng.IntN(2) == 0 {
					time.Sleep(between(0, 500*time.Millisecond))
				}
			}
		})
	}
	time.Sleep(lasts)
	enough()
	producers.Wait()
	drainBegan := time.Now()
	if !waitUntil(90*time.Second, func() bool {
		g := group(t, c, "t", "g")
		return g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Waiting == 0
	}) {
		t.Errorf("not drained within 90 s: %+v", group(t, c, "t", "g"))
	}
	drained := time.Since(drainBegan)
	close(stopping)
	controllers.Wait()

	events, strays, effects := torturedHistory(t, conn, rec)
	o := history.Options{Groups: []string{"g"}, OrderedGroups: []string{"g"}, Keep: 20}
	report := history.Judge(events, o)
	t.Logf("%d processes, %d stopped, %d killed, %d suspended; %d strays without a lease, %d effects; drained in %v\n%s",
		faults.started.Load(), faults.stopped.Load(), faults.killed.Load(), faults.suspended.Load(), strays, effects,
		drained.Round(time.Millisecond), report)
	if !report.OK() {
		t.Errorf("judged:\n%s", report)
		for _, e := range history.Simplify(events, o) {
			t.Log(e)
		}
	}
	if n := value[int](t, conn, "select (select count(*) from weir.shard_range) + (select count(*) from weir.lease)"); n != 0 {
		t.Errorf("%d rows are left of shards and leases", n)
	}
	if n := value[int](t, conn, "select count(*) from weir.delivery where state <> 'dead'"); n != 0 {
		t.Errorf("%d deliveries are left that are not dead", n)
	}
	if rows := column[string](t, conn, `
		select format('message %s: %s', d.message_id, d.errors)
		from weir.delivery as d
		where (d.payload ->> 'Dead') = '' and d.errors -> -1 ->> 'error' !~ 'lease expired'
		union all
		select format('message %s is not dead', l.id)
		from weir.log_1 as l
		where (l.payload ->> 'Dead') <> '' and not exists (select from weir.delivery as d where d.message_id = l.id and d.state = 'dead')`,
	); len(rows) > 0 {
		t.Errorf("%d messages are dead that should not be, or the other way round: %v", len(rows), rows[:min(len(rows), 10)])
	}
	if n := value[int](t, conn, `
		select count(*) from (select message from record where event = 'effect' group by message having count(*) > 1) as twice`); n != 0 {
		t.Errorf("%d messages have more than one effect", n)
	}
	if limit := int(faults.suspended.Load()+faults.killed.Load()+1) * 8; strays > limit {
		t.Errorf("%d handlings began without a lease, in %d suspensions of 8 handlers", strays, faults.suspended.Load())
	}
}

// torturedProducer produces in transactions that overlap with others', until ctx ends.
func torturedProducer(ctx context.Context, t *testing.T, c *weir.Client, dsn string, rec *history.Recorder, n, keys int, rng *rand.Rand) {
	life := context.WithoutCancel(ctx)
	conn, err := pgx.Connect(life, dsn)
	if err != nil {
		t.Errorf("producer: %v", err)
		return
	}
	defer conn.Close(life)
	for tx := 0; ctx.Err() == nil; tx++ {
		type one struct {
			id         int64
			value, key string
		}
		var list []one
		rollBack := rng.IntN(20) == 0
		few := keys
		from := 0
		if rng.IntN(4) == 0 { // all of one key
			few, from = 1, rng.IntN(keys)
		}
		err := pgx.BeginFunc(life, conn, func(x pgx.Tx) error {
			for i := range 1 + rng.IntN(8) {
				m := one{value: fmt.Sprintf("%d-%d-%d", n, tx, i), key: fmt.Sprintf("key %d", from+rng.IntN(few))}
				p := tortured{Value: m.value}
				switch r := rng.IntN(1000); {
				case r < 3:
					p.Dead = "now"
				case r < 5:
					p.Dead = "late"
				case r < 50:
					p.Fail = 1 + rng.IntN(2)
				}
				var delay *time.Duration
				if rng.IntN(50) == 0 {
					d := time.Duration(rng.Int64N(int64(1500 * time.Millisecond)))
					delay = &d
				}
				payload, err := json.Marshal(p)
				if err != nil {
					return err
				}
				rec.ProduceStarted("t", m.value, m.key)
				if err := x.QueryRow(life, "select weir.produce('t', $1::text::json, $2, delay => $3)", string(payload), m.key, delay).Scan(&m.id); err != nil {
					return err
				}
				list = append(list, m)
			}
			hold := time.Duration(rng.Int64N(int64(100 * time.Millisecond)))
			if rng.IntN(30) == 0 {
				hold = time.Duration(rng.Int64N(int64(time.Second)))
			}
			time.Sleep(hold)
			if rollBack {
				return context.Canceled
			}
			return nil
		})
		switch {
		case rollBack:
			for _, m := range list {
				rec.ProduceFailed(m.value)
			}
		case err != nil:
			t.Errorf("producer: %v", err)
			return
		default:
			for _, m := range list {
				rec.Produced("t", m.id, m.value, m.key)
			}
			c.Wake("t")
		}
	}
}

// torturedHistory is what the database recorded, with what was produced.
func torturedHistory(t *testing.T, conn *pgx.Conn, rec *history.Recorder) (events []history.Event, strays, effects int) {
	t.Helper()
	type message struct{ value, key string }
	messages := map[int64]message{}
	for _, e := range rec.Events() {
		if e.Kind == history.KindProduced {
			messages[e.ID] = message{e.Value, e.Key}
		}
		// That it was produced before it was handled is not in question, and the clock of this process is another.
		e.Time, e.Began = 0, 0
		events = append(events, e)
	}
	if stored := value[int](t, conn, "select count(*) from weir.log_1"); stored != len(messages) {
		t.Errorf("%d messages are stored, %d were produced", stored, len(messages))
	}
	rows, err := conn.Query(t.Context(), `
		select r.seq, r.at, r.event, r.consumer, r.message, r.attempt, coalesce(r.lease, 0) from record as r
		union all
		select e.lease, case e.how when 'acknowledged' then e.at else e.expired end, e.how, '', 0, 0, e.lease from lease_ended as e
		union all
		select d.message_id, (d.errors -> -1 ->> 'at')::timestamptz, 'dead', '', d.message_id, d.attempt, 0
		from weir.delivery as d where d.state = 'dead'`)
	noError(t, err)
	procs := map[string]int32{}
	var (
		seq, id, lease  int64
		at              time.Time
		event, consumer string
		attempt         int32
	)
	_, err = pgx.ForEachRow(rows, []any{&seq, &at, &event, &consumer, &id, &attempt, &lease}, func() error {
		if procs[consumer] == 0 {
			procs[consumer] = int32(len(procs) + 1)
		}
		e := history.Event{
			Time: at.UnixNano() - rec.Base(), Seq: 2 * seq, Proc: procs[consumer], Group: "g", By: consumer, Lease: fmt.Sprint(lease),
			ID: id, Attempt: attempt,
		}
		switch event {
		case "begin":
			if lease == 0 {
				strays++
				return nil
			}
			e.Kind, e.Value, e.Key = history.KindHandleStarted, messages[id].value, messages[id].key
		case "good", "effect", "failed", "undone":
			if lease == 0 {
				return nil
			}
			e.Kind, e.OK = history.KindHandleEnded, event == "good" || event == "effect"
			if event == "effect" {
				effects++
				also := e
				also.Kind, also.Seq, also.By, also.Lease = history.KindEffect, e.Seq+1, "", ""
				events = append(events, also)
			}
		case "acknowledged":
			e.Kind, e.OK, e.By, e.Lease = history.KindAcked, true, fmt.Sprint(lease), ""
		case "split", "taken over":
			e.Kind, e.By, e.Lease = history.KindLeaseLost, fmt.Sprint(lease), ""
		case "dead":
			e.Kind, e.Lease = history.KindDead, ""
		}
		events = append(events, e)
		return nil
	})
	noError(t, err)
	return events, strays, effects
}

// unreliable is a proxy before a server, which makes every kind of trouble with what goes through it.
type unreliable struct {
	t        *testing.T
	listener net.Listener
	dial     func() (net.Conn, error)
	lease    time.Duration

	mu      sync.Mutex
	rng     *rand.Rand
	frozen  time.Time // nothing goes through until then
	ends    map[net.Conn]bool
	faults  map[string]int
	trouble bool
}

// newUnreliable listens before the server of a DSN, and gives the DSN of the proxy.
func newUnreliable(t *testing.T, dsn string, lease time.Duration, rng *rand.Rand) (*unreliable, string) {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	noError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
	network, address := pgconn.NetworkAddress(config.Host, config.Port)
	u := &unreliable{
		t: t, listener: l, lease: lease, rng: rng, ends: map[net.Conn]bool{}, faults: map[string]int{}, trouble: true,
		dial: func() (net.Conn, error) { return net.Dial(network, address) },
	}
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go u.serve(client)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		u.mu.Lock()
		defer u.mu.Unlock()
		for end := range u.ends {
			_ = end.Close()
		}
	})
	return u, fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable", config.User, l.Addr(), config.Database)
}

// calm ends the trouble.
func (u *unreliable) calm() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.trouble = false
}

// pick decides what happens to a commit.
func (u *unreliable) pick() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.trouble {
		return ""
	}
	fault := ""
	switch n := u.rng.IntN(100); {
	case n < 4:
		fault = "cut before a commit"
	case n < 8:
		fault = "cut during a commit"
	case n < 12:
		fault = "cut after a commit"
	case n < 16:
		fault = "a pooler's error after a commit"
	case n < 17:
		fault = "a commit later than the lease"
	case n < 18:
		fault = "all stands still for longer than the lease"
		u.frozen = time.Now().Add(u.lease * 3 / 2)
	default:
		return ""
	}
	u.faults[fault]++
	return fault
}

// wait waits while nothing goes through.
func (u *unreliable) wait() {
	u.mu.Lock()
	until := u.frozen
	u.mu.Unlock()
	time.Sleep(time.Until(until))
}

func (u *unreliable) serve(client net.Conn) {
	server, err := u.dial()
	if err != nil {
		_ = client.Close()
		return
	}
	u.mu.Lock()
	u.ends[client], u.ends[server] = true, true
	u.mu.Unlock()
	end := func() {
		_ = client.Close()
		_ = server.Close()
		u.mu.Lock()
		defer u.mu.Unlock()
		delete(u.ends, client)
		delete(u.ends, server)
	}
	defer end()
	var swallow, instead atomic.Bool // the next answer is not passed on; an error is
	go func() {
		defer end()
		b := make([]byte, 1<<16)
		for {
			n, err := server.Read(b)
			if instead.Load() {
				// As of a pooler that has lost its server.
				_, _ = client.Write([]byte("E\x00\x00\x00\x2cSFATAL\x00VFATAL\x00C08P01\x00Mserver conn lost\x00\x00"))
				return
			}
			if err != nil || swallow.Load() {
				return
			}
			u.wait()
			if _, err := client.Write(b[:n]); err != nil {
				return
			}
		}
	}()
	b := make([]byte, 1<<16)
	for {
		n, err := client.Read(b)
		if err != nil {
			return
		}
		fault := ""
		if bytes.Contains(b[:n], []byte("commit\x00")) {
			fault = u.pick()
		}
		switch fault {
		case "cut before a commit":
			return
		case "cut after a commit":
			swallow.Store(true)
		case "a pooler's error after a commit":
			instead.Store(true)
		case "a commit later than the lease":
			time.Sleep(u.lease * 3 / 2)
		}
		u.wait()
		if _, err := server.Write(b[:n]); err != nil || fault == "cut during a commit" {
			return
		}
	}
}

// Whatever happens to connections, at commits too, and to leases: a handler's effects are there once for each message, in a table
// that would take them twice. Each kind of handler runs in a group of each mode, by two consumers, each behind a proxy that cuts
// connections before, during and after a commit, so that nobody knows its outcome, or lets nothing through until leases have
// expired; and backends are terminated at random. Handlers fail at random too, also when they are called again after a commit whose
// outcome did not arrive.
func TestEffectsExactlyOnce(t *testing.T) {
	t.Parallel()
	const (
		total = 400
		lease = 300 * time.Millisecond
	)
	seed := seeded(t)
	for m, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			conn := connect(t, dsn)
			noError(t, c.CreateTopic(t.Context(), "t", nil))
			execute(t, conn, "create table effect (grp text, message bigint, attempt int)")
			groups := []string{"tx", "sql", "batch tx", "batch sql"}
			for _, g := range groups {
				noError(t, c.CreateGroup(t.Context(), "t", g, &weir.GroupOptions{
					Mode: mode, MaxAttempts: 1000, RetryDelay: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond,
				}))
			}
			const insert = "insert into effect values ($1, $2, $3)"
			quiet := &weir.Options{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))}
			var proxies []*unreliable
			for i, g := range groups {
				for k := range 2 {
					rng := rand.New(rand.NewPCG(seed, uint64(100*m+10*i+k)))
					proxy, through := newUnreliable(t, dsn, lease, rng)
					proxies = append(proxies, proxy)
					pool := newPool(t, through, func(config *pgxpool.Config) {
						config.MaxConns = 5
						config.ConnConfig.RuntimeParams["application_name"] = "consumer"
					})
					client, err := weir.New(pool, quiet)
					noError(t, err)
					t.Cleanup(client.Close)
					work := func(messages int) error {
						time.Sleep(time.Duration(rand.Int64N(int64(4 * time.Millisecond))))
						if rand.IntN(100) == 0 {
							time.Sleep(lease * 3 / 2)
						}
						if rand.IntN(20) == 0 {
							failure := errors.New("not now")
							if rand.IntN(2) == 0 {
								failure = &pgconn.PgError{Code: "40001", Message: "could not serialize access"}
							}
							if messages > 1 && rand.IntN(2) == 0 {
								failure = &weir.BatchError{Failed: map[int]error{rand.IntN(messages): failure}}
							}
							return failure
						}
						return nil
					}
					inTx := func(ctx context.Context, tx pgx.Tx, messages ...*weir.Received[int]) error {
						for _, m := range messages {
							if _, err := tx.Exec(ctx, insert, g, m.ID, m.Attempt); err != nil {
								return err
							}
						}
						return work(len(messages))
					}
					inSQL := func(ctx context.Context, tx *sql.Tx, messages ...*weir.Received[int]) error {
						for _, m := range messages {
							if _, err := tx.ExecContext(ctx, insert, g, m.ID, m.Attempt); err != nil {
								return err
							}
						}
						return work(len(messages))
					}
					var h weir.Handler
					switch g {
					case "tx":
						h = weir.HandleTx(func(ctx context.Context, tx pgx.Tx, m *weir.Received[int]) error { return inTx(ctx, tx, m) })
					case "batch tx":
						h = weir.HandleBatchTx(func(ctx context.Context, tx pgx.Tx, m []*weir.Received[int]) error { return inTx(ctx, tx, m...) })
					default:
						config, err := pgx.ParseConfig(through)
						noError(t, err)
						config.RuntimeParams["application_name"] = "consumer"
						db := stdlib.OpenDB(*config)
						db.SetMaxOpenConns(4)
						t.Cleanup(func() { _ = db.Close() })
						if g == "sql" {
							h = weir.HandleSQL(db, func(ctx context.Context, tx *sql.Tx, m *weir.Received[int]) error { return inSQL(ctx, tx, m) })
						} else {
							h = weir.HandleBatchSQL(db, func(ctx context.Context, tx *sql.Tx, m []*weir.Received[int]) error { return inSQL(ctx, tx, m...) })
						}
					}
					consume(t, client, "t", g, h, &weir.ConsumerOptions{
						Concurrency: 4, BatchSize: 5, Prefetch: 10, Lease: lease, PollInterval: 50 * time.Millisecond,
						StopTimeout: time.Second,
					})
				}
			}
			list := make([]weir.Message, total)
			for i := range list {
				list[i] = weir.Message{Key: fmt.Sprint(i % 40), Payload: i}
			}
			ids := produced(t, c, "t", list...)
			began := time.Now()
			killed := 0
			left := func() (n int) {
				for _, name := range groups {
					g := group(t, c, "t", name)
					if g.Lag > 0 || g.Leases > 0 || g.Retrying > 0 || g.Waiting > 0 {
						n++
					}
				}
				return n
			}
			for left() > 0 {
				if time.Since(began) > time.Minute {
					for _, name := range groups {
						t.Logf("%+v", group(t, c, "t", name))
					}
					t.Logf("%s", column[string](t, conn, "select l::text from weir.lease l"))
					t.Logf("%s", column[string](t, conn, "select d::text from weir.delivery d"))
					t.Fatal("not done within a minute")
				}
				time.Sleep(20 * time.Millisecond)
				if time.Since(began) > 20*time.Second {
					for _, p := range proxies {
						p.calm()
					}
					continue
				}
				killed += value[int](t, conn, `
					select count(*) filter (where pg_terminate_backend(a.pid))
					from (
					    select pid from pg_stat_activity
					    where datname = current_database() and application_name = 'consumer' order by random() limit 1
					) as a`)
			}
			faults := map[string]int{"a backend terminated": killed}
			for _, p := range proxies {
				p.mu.Lock()
				for fault, n := range p.faults {
					faults[fault] += n
				}
				p.mu.Unlock()
			}
			t.Logf("done after %v: %v", time.Since(began).Round(time.Millisecond), faults)
			for _, name := range groups {
				if rows := column[string](t, conn, `
					select format('message %s: %s effects, in attempts %s', i, count(e.message), array_agg(e.attempt))
					from unnest($2::bigint[]) as i
					left join effect as e on e.message = i and e.grp = $1
					group by i
					having count(e.message) <> 1
					order by i`, name, ids); len(rows) > 0 {
					t.Errorf("group %s: %d messages have not exactly one effect: %v", name, len(rows), rows[:min(len(rows), 10)])
				}
				if g := group(t, c, "t", name); g.Dead > 0 {
					t.Errorf("group %s has %d dead letters", name, g.Dead)
				}
			}
		})
	}
}

// job is the payload of a message of TestQueueKilled.
type job struct{ Micros int64 }

func init() {
	// Works off topic t as the queue group g, and records each run of a job.
	children["worker"] = func() {
		ctx := told()
		c, pool := childClient(ctx, 8)
		name := os.Getenv("NAME")
		lease, err := time.ParseDuration(os.Getenv("LEASE"))
		if err != nil {
			childFail(err)
		}
		k, err := c.NewConsumer("t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[job]) error {
			if _, err := pool.Exec(ctx, "insert into run values ($1, $2, $3, false)", m.ID, m.Attempt, name); err != nil {
				return err
			}
			time.Sleep(time.Duration(m.Value.Micros) * time.Microsecond)
			_, err := pool.Exec(ctx, "insert into run values ($1, $2, $3, true)", m.ID, m.Attempt, name)
			return err
		}), &weir.ConsumerOptions{Name: name, Concurrency: 25, Lease: lease, PollInterval: 200 * time.Millisecond})
		if err != nil {
			childFail(err)
		}
		if err := k.Run(ctx); err != nil {
			childFail(err)
		}
		c.Close()
		pool.Close()
	}
}

// Two hundred workers in eight processes have ten thousand jobs of 0.1 to 5 s, half of the processes are killed in the middle. Every
// job is done; one is run again only if a killed process was at it or had not yet acknowledged it, and once at most; every
// other one is run once. By default the jobs take a fiftieth of that time, with WEIR_LONG all of it.
func TestQueueKilled(t *testing.T) {
	t.Parallel()
	const (
		total   = 10_000
		workers = 8
	)
	seed := seeded(t)
	scale, lease := int64(50), 3*time.Second
	if os.Getenv("WEIR_LONG") != "" {
		scale, lease = 1, 15*time.Second
	}
	s := pgtest.New(t, &pgtest.Options{Fast: true})
	c, dsn := openOn(t, s, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Queue})
	conn := connect(t, dsn)
	execute(t, conn, `
		create table run (job bigint, attempt int, consumer text, ended boolean);
		create index on run (job)`)
	rng := rand.New(rand.NewPCG(seed, 0))
	list := make([]weir.Message, total)
	for i := range list {
		list[i].Payload = job{Micros: (100_000 + rng.Int64N(4_900_000)) / scale}
	}
	produced(t, c, "t", list...)
	began := time.Now()
	processes := make([]*process, workers)
	for i := range processes {
		processes[i] = launch(t, "worker", "DSN="+dsn, fmt.Sprintf("NAME=w%d", i), fmt.Sprintf("LEASE=%v", lease))
	}
	done := func() int {
		return value[int](t, conn, "select count(*) from run where ended")
	}
	within(t, 10*time.Minute, "four in ten jobs are done", func() bool {
		time.Sleep(50 * time.Millisecond)
		return done() >= total*4/10
	})
	rng.Shuffle(workers, func(i, j int) { processes[i], processes[j] = processes[j], processes[i] })
	var killed []string
	for _, p := range processes[:workers/2] {
		_ = p.Process.Kill()
	}
	for _, p := range processes[:workers/2] {
		<-p.ended
		for _, e := range p.Env {
			if name, is := strings.CutPrefix(e, "NAME="); is {
				killed = append(killed, name)
			}
		}
	}
	atKill := done()
	within(t, 10*time.Minute, "all is done", func() bool {
		time.Sleep(50 * time.Millisecond)
		g := group(t, c, "t", "g")
		return g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Waiting == 0
	})
	took := time.Since(began)
	for _, p := range processes[workers/2:] {
		noError(t, p.stop())
	}
	if g := group(t, c, "t", "g"); g.Dead > 0 {
		t.Errorf("%d jobs are dead", g.Dead)
	}
	if n := value[int](t, conn, "select count(distinct job) from run where ended"); n != total {
		t.Errorf("%d jobs are done, want %d", n, total)
	}
	rows, err := conn.Query(t.Context(), `
		select job, count(*) filter (where not ended) as runs,
		    count(*) filter (where not ended and consumer = any ($1)) as killed_runs
		from run group by job having count(*) filter (where not ended) > 1`, killed)
	noError(t, err)
	var id int64
	var runs, killedRuns, again int
	_, err = pgx.ForEachRow(rows, []any{&id, &runs, &killedRuns}, func() error {
		again++
		if runs > 2 || killedRuns != 1 {
			t.Errorf("job %d was run %d times, %d of them by processes that were killed", id, runs, killedRuns)
		}
		return nil
	})
	noError(t, err)
	t.Logf("%d jobs done in %v, %d of them before four of %d processes were killed; %d jobs were run again",
		total, took.Round(time.Millisecond), atKill, workers, again)
	if again == 0 {
		t.Error("no job was run again: the kill came in nobody's way")
	}
}

func init() {
	// Consumes topic t as group g, notes what it has handled, and dies of the message that says so.
	children["dying"] = func() {
		ctx := told()
		c, pool := childClient(ctx, 6)
		name := os.Getenv("NAME")
		k, err := c.NewConsumer("t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[string]) error {
			if m.Value == "exit" || m.Value == "kill" {
				if _, err := pool.Exec(ctx, "insert into death (message, attempt) values ($1, $2)", m.ID, m.Attempt); err != nil {
					return err
				}
				if m.Value == "kill" {
					_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
					select {}
				}
				os.Exit(1)
			}
			_, err := pool.Exec(ctx, "insert into handled (message, key) values ($1, $2)", m.ID, m.Key)
			return err
		}), &weir.ConsumerOptions{Name: name, Concurrency: 4, Lease: 700 * time.Millisecond, PollInterval: 20 * time.Millisecond})
		if err != nil {
			childFail(err)
		}
		if err := k.Run(ctx); err != nil {
			childFail(err)
		}
		c.Close()
		pool.Close()
	}
}

// What a poisonous message can do, in each mode.
func TestPoisonModes(t *testing.T) {
	t.Parallel()

	// A message that brings its process down is dead after the group's attempts, and takes no other with it.
	for _, mode := range modes {
		for _, how := range []string{"exit", "kill"} {
			t.Run("death by "+how+"/"+string(mode), func(t *testing.T) {
				t.Parallel()
				c, dsn := open(t, nil)
				topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode, MaxAttempts: 3, RetryDelay: -1})
				conn := connect(t, dsn)
				execute(t, conn, `
					create table handled (seq bigserial, at timestamptz default clock_timestamp(), message bigint, key text);
					create table death (at timestamptz default clock_timestamp(), message bigint, attempt int)`)
				list := make([]weir.Message, 60)
				for i := range list {
					list[i] = weir.Message{Key: fmt.Sprint("k", i%6), Payload: "good"}
				}
				const poison = 20 // of key k2
				list[poison].Payload = how
				ids := produced(t, c, "t", list...)
				var running [2]*process
				started := 0
				within(t, time.Minute, "only the dead letter is left", func() bool {
					for i, p := range running {
						if p == nil || !p.alive() {
							started++
							running[i] = launch(t, "dying", "DSN="+dsn, fmt.Sprintf("NAME=d%d", started))
						}
					}
					time.Sleep(20 * time.Millisecond)
					g := group(t, c, "t", "g")
					return g.Dead > 0 && g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Waiting == 0
				})
				for _, p := range running {
					noError(t, p.stop())
				}
				dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 10)
				noError(t, err)
				if len(dead) != 1 || dead[0].ID != ids[poison] || dead[0].Attempt != 3 || !strings.Contains(dead[0].Error, "lease expired") {
					t.Errorf("dead letters are %+v, want message %d after 3 attempts", dead, ids[poison])
				}
				// A slow machine may lose a lease before the message is begun.
				attempts := column[int](t, conn, "select attempt from death where message = $1 order by at", ids[poison])
				if last := len(attempts) - 1; last < 0 || attempts[last] != 3 || !slices.IsSorted(attempts) || len(slices.Compact(slices.Clone(attempts))) != len(attempts) {
					t.Errorf("it brought processes down in the attempts %v, want 1, 2, 3", attempts)
				}
				want := slices.Delete(slices.Clone(ids), poison, poison+1)
				if handled := column[int64](t, conn, "select distinct message from handled order by 1"); !slices.Equal(handled, want) {
					t.Errorf("handled are %v, want all but %d", handled, ids[poison])
				}
				if mode != weir.Ordered {
					return
				}
				if rows := column[string](t, conn, `
					select format('message %s of key %s', l.message, l.key)
					from (
					    select message, key, seq, lead(seq) over (partition by key order by message) as next
					    from (select message, key, max(seq) as seq from handled group by message, key) as last
					) as l
					where next < seq`); len(rows) > 0 {
					t.Errorf("out of order: the last handlings of %v", rows)
				}
				if n := value[int](t, conn, "select count(*) from handled where key = 'k2' and message > $1 and at < (select max(at) from death)", ids[poison]); n > 0 {
					t.Errorf("%d messages of its key were handled before it was dead", n)
				}
			})
		}
	}

	// A message that always fails is dead after the group's attempts; the others go on meanwhile, in an ordered group those of its key
	// after that.
	for _, mode := range modes {
		t.Run("always failing/"+string(mode), func(t *testing.T) {
			t.Parallel()
			c, _ := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode, MaxAttempts: 4, RetryDelay: 300 * time.Millisecond})
			ids := produced(t, c, "t", keyed(10, 20)...)
			bad := ids[13] // of key k3
			var mu sync.Mutex
			var order []int64
			tries := 0
			for range 2 {
				consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
					mu.Lock()
					defer mu.Unlock()
					if m.ID == bad {
						if tries++; tries != m.Attempt {
							t.Errorf("attempt is %d, want %d", m.Attempt, tries)
						}
						if tries == 4 {
							order = append(order, m.ID)
						}
						return errors.New("never")
					}
					order = append(order, m.ID)
					return nil
				}), &weir.ConsumerOptions{Concurrency: 4})
			}
			eventually(t, "one is dead", func() bool { return group(t, c, "t", "g").Dead == 1 })
			drained(t, c, "t", "g")
			mu.Lock()
			defer mu.Unlock()
			if sorted := slices.Sorted(slices.Values(order)); !slices.Equal(sorted, ids) || tries != 4 {
				t.Errorf("%d messages were handled, the bad one was tried %d times, want %d and 4", len(order), tries, len(ids))
			}
			after := order[slices.Index(order, bad)+1:]
			for _, id := range after {
				if mode != weir.Ordered || (id-1)%10 != 3 {
					t.Errorf("message %d waited for message %d", id, bad)
				}
			}
			if mode == weir.Ordered && (len(after) != 18 || !slices.IsSorted(after)) {
				t.Errorf("after message %d came %v, want the 18 that follow it in its key, in order", bad, after)
			}
		})
	}

	// Key k, messages 0 to 4, of which 0 fails twice: 0, 1, 2, 3, 4, with every kind of handler and several consumers.
	t.Run("fails twice", func(t *testing.T) {
		t.Parallel()
		c, _ := open(t, nil)
		noError(t, c.CreateTopic(t.Context(), "t", nil))
		for _, kind := range []string{"single", "batch", "single in a transaction", "batch in a transaction"} {
			noError(t, c.CreateGroup(t.Context(), "t", kind, &weir.GroupOptions{Mode: weir.Ordered, RetryDelay: 50 * time.Millisecond}))
			var mu sync.Mutex
			order := map[string][]int{}
			tries := map[string]int{}
			handle := func(messages ...*weir.Received[int]) error {
				mu.Lock()
				defer mu.Unlock()
				failed := map[int]error{}
				for i, m := range messages {
					if m.Value == 0 && tries[m.Key] < 2 {
						tries[m.Key]++
						failed[i] = errors.New("not now")
					}
				}
				if len(failed) > 0 && strings.HasPrefix(kind, "single") {
					return failed[0]
				}
				for i, m := range messages {
					if failed[i] == nil && (len(failed) == 0 || kind == "batch") {
						order[m.Key] = append(order[m.Key], m.Value)
					}
				}
				if len(failed) > 0 {
					return &weir.BatchError{Failed: failed}
				}
				return nil
			}
			h := map[string]weir.Handler{
				"single": weir.Handle(func(_ context.Context, m *weir.Received[int]) error { return handle(m) }),
				"batch":  weir.HandleBatch(func(_ context.Context, m []*weir.Received[int]) error { return handle(m...) }),
				"single in a transaction": weir.HandleTx(func(_ context.Context, _ pgx.Tx, m *weir.Received[int]) error {
					return handle(m)
				}),
				"batch in a transaction": weir.HandleBatchTx(func(_ context.Context, _ pgx.Tx, m []*weir.Received[int]) error {
					return handle(m...)
				}),
			}[kind]
			for range 3 {
				consume(t, c, "t", kind, h, &weir.ConsumerOptions{Concurrency: 2, BatchSize: 4})
			}
			t.Cleanup(func() {
				mu.Lock()
				defer mu.Unlock()
				for k := range 8 {
					key := fmt.Sprint("k", k)
					if !slices.Equal(order[key], []int{0, 1, 2, 3, 4}) || tries[key] != 2 {
						t.Errorf("%s: key %s was handled in the order %v after %d failures", kind, key, order[key], tries[key])
					}
				}
			})
		}
		produced(t, c, "t", keyed(8, 5)...)
		for _, g := range []string{"single", "batch", "single in a transaction", "batch in a transaction"} {
			drained(t, c, "t", g)
		}
	})

	// A dependency is down for a while: ten thousand failures (of an ordered group fewer). They back off, their retries are spread out, and when it is there again
	// they drain no later than the longest delay, and at a stated rate.
	for _, mode := range modes {
		t.Run("a dependency is down/"+string(mode), func(t *testing.T) {
			t.Parallel()
			const (
				delay = 500 * time.Millisecond
				most  = 4 * time.Second
			)
			// The failures of a shard are recorded one after the other.
			total, enough := 3000, int64(10_000)
			if mode == weir.Ordered {
				total, enough = 500, 1500
			}
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode, MaxAttempts: 100, RetryDelay: delay, RetryMax: most})
			conn := connect(t, dsn)
			produced(t, c, "t", keyed(total, 1)...)
			var down atomic.Bool
			down.Store(true)
			var failures atomic.Int64
			handled := newTally()
			for range 2 {
				consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
					if down.Load() {
						failures.Add(1)
						return errors.New("the dependency is down")
					}
					handled.add(m.ID)
					return nil
				}), &weir.ConsumerOptions{Concurrency: 16})
			}
			began := time.Now()
			within(t, time.Minute, "enough have failed, over 5 s", func() bool {
				return failures.Load() >= enough && time.Since(began) > 5*time.Second
			})
			outage := time.Since(began)
			// What is in a handler at this moment has no delivery yet.
			type wait struct {
				Attempt int
				Wait    float64
				Ahead   float64
			}
			rows, err := conn.Query(t.Context(), `
				select attempt, extract(epoch from due_at - (errors -> -1 ->> 'at')::timestamptz)::float8,
				    extract(epoch from due_at - clock_timestamp())::float8
				from weir.delivery where state = 'ready' and errors <> '[]'`)
			noError(t, err)
			waits, err := pgx.CollectRows(rows, pgx.RowToStructByPos[wait])
			noError(t, err)
			down.Store(false)
			up := time.Now()
			var tenths [10]int
			ahead := map[int]int{}
			for _, w := range waits {
				d := min(delay<<(w.Attempt-1), most).Seconds()
				part := w.Wait / d                        // 0.5 to 1
				if w.Wait < d/2-0.05 || w.Wait > d+0.05 { // the two times are not taken at the same moment
					t.Errorf("attempt %d is tried again after %.3f s, want half to all of %.3f s", w.Attempt, w.Wait, d)
					break
				}
				tenths[min(max(int((part-0.5)*20), 0), 9)]++
				if w.Ahead > 0 {
					ahead[int(w.Ahead*10)]++
				}
			}
			for _, n := range tenths {
				if len(waits) > 500 && (n < len(waits)/20 || n > len(waits)/5) {
					t.Errorf("retries are not spread out: tenths of their range hold %v of %d", tenths, len(waits))
					break
				}
			}
			peak := 0
			for _, n := range ahead {
				peak = max(peak, n)
			}
			if peak > total/5 {
				t.Errorf("%d of %d retries are due in the same 100 ms", peak, total)
			}
			drained(t, c, "t", "g")
			took := time.Since(up)
			t.Logf("%d failures in %v, then %d messages drained in %v: %.0f/s; at most %d due in 100 ms; tenths of the range of the delay: %v",
				failures.Load(), outage.Round(time.Millisecond), handled.distinct(), took.Round(time.Millisecond),
				float64(total)/took.Seconds(), peak, tenths)
			if handled.distinct() != total || handled.calls() != total {
				t.Errorf("%d messages were handled in %d calls, want %d", handled.distinct(), handled.calls(), total)
			}
			if took > most+10*time.Second {
				t.Errorf("drained %v after the dependency was there again, with a longest delay of %v", took, most)
			}
		})
	}
}

// cost is what a claim takes: of some, after as many to warm up, the median of the buffers, and the time that the fastest quarter keeps
// to, as others use the machine as well.
type cost struct {
	buffers int
	took    time.Duration
}

// claimCost measures claims of at most five messages, which are acknowledged, so that each finds the group as the one before did.
func claimCost(t *testing.T, conn *pgx.Conn, claims int) cost {
	t.Helper()
	execute(t, conn, "set max_parallel_workers_per_gather = 0")
	var buffers []int
	var took []time.Duration
	for i := range 2 * claims {
		var plan string
		noError(t, conn.QueryRow(t.Context(), `
			explain (analyze, buffers, timing off, summary on, format json) select weir.claim('t', 'g', 'c', 5, '1 hour')`).Scan(&plan))
		var parsed []struct {
			Plan struct {
				Hit  int `json:"Shared Hit Blocks"`
				Read int `json:"Shared Read Blocks"`
				Rows int `json:"Actual Rows"`
			}
			Time float64 `json:"Execution Time"`
		}
		noError(t, json.Unmarshal([]byte(plan), &parsed))
		if i >= claims {
			if parsed[0].Plan.Rows == 0 {
				t.Fatalf("claim %d found nothing", i)
			}
			buffers = append(buffers, parsed[0].Plan.Hit+parsed[0].Plan.Read)
			took = append(took, time.Duration(parsed[0].Time*float64(time.Millisecond)))
		}
		execute(t, conn, `
			select weir.ack(l.id, 'c') from weir.lease as l where l.consumer = 'c'
			union all
			select weir.ack(d.lease_id, 'c') from weir.delivery as d where d.lease_id is not null`)
	}
	slices.Sort(buffers)
	slices.Sort(took)
	return cost{buffers[len(buffers)/2], took[len(took)/4]}
}

// With a hundred thousand dead and a hundred thousand delayed deliveries, of which some have a priority, a claim costs what it costs
// with a hundred of each: within 2 ms more or less, as others use the machine as well, and in a constant number of buffers. Messages
// that are delayed for long do not keep those that are delayed for a moment from coming soon after their time.
func TestBacklogOfDeliveries(t *testing.T) {
	t.Parallel()
	const each = 100_000
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			conn := connect(t, dsn)
			topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1_000_000}, &weir.GroupOptions{Mode: mode, Shards: map[weir.Mode]int{weir.Ordered: 16}[mode]})
			// What is claimed has keys of its own.
			fresh := make([]weir.Message, 1200)
			for i := range fresh {
				fresh[i] = weir.Message{Key: fmt.Sprint("fresh ", i), Payload: i}
			}
			produced(t, c, "t", fresh...)
			eventually(t, "the head is settled", func() bool {
				_ = claim(t, conn, "t", "g", "c", 1, "1 hour")
				return value[bool](t, conn, "select settled = 1200 from weir.groups")
			})
			// As they would be of messages that the log had before: half of them dead, half of them delayed.
			shard := "null"
			if mode == weir.Ordered {
				shard = value[string](t, conn, "select weir.shard_sql(16)")
			}
			backlog := func(low, high int) {
				execute(t, conn, fmt.Sprintf(`
					insert into weir.delivery (group_id, message_id, state, due_at, attempt, suspect, shard, priority, key, payload, produced_at, errors)
					select 1, -id, case when id %% 2 = 0 then 'ready' else 'dead' end,
					    clock_timestamp() + case when id %% 2 = 0 then interval '1 hour' + id * interval '1 ms' else interval '-1 hour' end, 3, false, %s,
					    case when id %% 10 = 0 then id / 10 %% 3 - 1 else 0 end, key, '{}', clock_timestamp(), '[{"error": "no"}]'
					from (select n as id, 'key ' || n as key from generate_series($1::int, $2) as n) as m`, shard), low, high)
			}
			// What the planner knows is of a small table, as it is after a burst and before autovacuum comes by.
			execute(t, conn, "alter table weir.delivery set (autovacuum_enabled = off)")
			backlog(1, 200)
			execute(t, conn, "vacuum analyze")
			before := claimCost(t, conn, 30)
			backlog(201, 2*each)
			kept := claimCost(t, conn, 30)
			planned := claimCost(t, connect(t, dsn), 30)
			execute(t, conn, "vacuum analyze weir.delivery")
			analyzed := claimCost(t, connect(t, dsn), 30)
			t.Logf("a claim takes %d buffers and %v with a small backlog; with a large one %d and %v with the plans of before, %d and %v with new ones, %d and %v when it was analyzed",
				before.buffers, before.took, kept.buffers, kept.took, planned.buffers, planned.took, analyzed.buffers, analyzed.took)
			for _, a := range []cost{kept, planned, analyzed} {
				// Twice the pages is another plan or a cache that is cold; what grew with the backlog would take thousands.
				if a.buffers > before.buffers*3+100 {
					t.Errorf("a claim takes %d buffers with a large backlog, %d with a small one", a.buffers, before.buffers)
				}
				if limit := 2*time.Millisecond + 2*before.took; a.took > limit {
					t.Errorf("a claim takes %v with a large backlog, want at most %v", a.took, limit)
				}
			}

			// Some that are due in a moment.
			var mu sync.Mutex
			late := map[int64]time.Duration{}
			k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[json.RawMessage]) error {
				var at struct{ Due time.Time }
				if len(m.Value) > 0 && m.Value[0] == '{' {
					if err := json.Unmarshal(m.Value, &at); err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					late[m.ID] = time.Since(at.Due)
				}
				return nil
			}), &weir.ConsumerOptions{Concurrency: 4})
			eventually(t, "the others are handled", func() bool { return group(t, c, "t", "g").Lag == 0 })
			execute(t, conn, `
				select weir.produce('t', json_build_object('Due', at), 'due ' || n % 10, deliver_at => at)
				from generate_series(1, 40) as n
				cross join lateral (select clock_timestamp() + interval '500 ms' + n * interval '25 ms' as at) as d`)
			c.Wake("t")
			eventually(t, "those that were delayed for a moment are handled", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return len(late) == 40
			})
			k.stop()
			mu.Lock()
			defer mu.Unlock()
			var worst time.Duration
			for id, d := range late {
				worst = max(worst, d)
				if d < 0 {
					t.Errorf("message %d came %v before its time", id, -d)
				}
			}
			t.Logf("the latest of the delayed messages came %v after its time", worst.Round(time.Millisecond))
			// Another test's transaction on this server may hold up the fence, and with it what an idle poll finds a second later.
			if worst > 2*time.Second {
				t.Errorf("a delayed message came %v after its time", worst)
			}
		})
	}
}

// shifted gives a client on a database whose server's clock, as Weir sees it, is ahead of the clocks of clients. The functions that
// tell the time give way to others of their names, before Weir is installed.
func shifted(t *testing.T, ahead time.Duration) (*weir.Client, string) {
	t.Helper()
	dsn := pgtest.Shared(t).Database(t)
	conn := connect(t, dsn)
	execute(t, conn, fmt.Sprintf(`
		alter function pg_catalog.clock_timestamp() rename to true_clock_timestamp;
		alter function pg_catalog.now() rename to true_now;
		create function pg_catalog.clock_timestamp() returns timestamptz language sql volatile
		    begin atomic select pg_catalog.true_clock_timestamp() + interval '%[1]d s'; end;
		create function pg_catalog.now() returns timestamptz language sql stable
		    begin atomic select pg_catalog.true_now() + interval '%[1]d s'; end`, int(ahead.Seconds())))
	return openDSN(t, dsn, nil), dsn
}

// The server alone judges leases, retries and delays: clients whose clocks are ten minutes off, either way, lose no lease, take none too
// early, and wait for nothing longer.
func TestClientClocksOff(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%v/%s", ahead, mode), func(t *testing.T) {
				t.Parallel()
				c, dsn := shifted(t, ahead)
				topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode, RetryDelay: 400 * time.Millisecond})
				conn := connect(t, dsn)
				if off := value[float64](t, conn, "select extract(epoch from clock_timestamp() - true_clock_timestamp())"); off < ahead.Seconds()-1 || off > ahead.Seconds()+1 {
					t.Fatalf("the clock is %v s ahead, want %v", off, ahead)
				}
				// Somebody who dies.
				produced(t, c, "t", weir.Message{Key: "died", Payload: 0})
				var died []claimed
				eventually(t, "there is something to claim", func() bool {
					died = claim(t, conn, "t", "g", "died", 10, "1 s")
					return len(died) > 0
				})
				diedAt := time.Now()
				ids := produced(t, c, "t", keyed(5, 4)...)
				var mu sync.Mutex
				times := map[int64][]time.Time{}
				k := consume(t, c, "t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
					mu.Lock()
					times[m.ID] = append(times[m.ID], time.Now())
					n := len(times[m.ID])
					mu.Unlock()
					switch {
					case m.ID == ids[3]:
						select { // three times as long as the lease
						case <-time.After(1500 * time.Millisecond):
						case <-ctx.Done():
							t.Errorf("its context ended: %v", context.Cause(ctx))
						}
					case m.ID == ids[7] && n == 1:
						return errors.New("not now")
					}
					return nil
				}), &weir.ConsumerOptions{Concurrency: 3, Lease: 500 * time.Millisecond})
				delayed := value[int64](t, conn, "select weir.produce('t', '1', 'delayed', delay => '700 ms')")
				put := time.Now()
				eventually(t, "all are handled", func() bool { return k.Stats().Handled == int64(len(ids)+2) })
				drained(t, c, "t", "g")
				mu.Lock()
				defer mu.Unlock()
				for _, id := range slices.Concat(ids, []int64{died[0].High, delayed}) {
					if want := map[bool]int{false: 1, true: 2}[id == ids[7]]; len(times[id]) != want {
						t.Errorf("message %d was handled %d times, want %d", id, len(times[id]), want)
					}
				}
				if k.Stats().Lost != 0 {
					t.Errorf("%d leases were lost", k.Stats().Lost)
				}
				for _, w := range []struct {
					what      string
					took      time.Duration
					low, high time.Duration
				}{
					{"the takeover", times[died[0].High][0].Sub(diedAt), 900 * time.Millisecond, 6 * time.Second},
					{"the retry", times[ids[7]][1].Sub(times[ids[7]][0]), 200 * time.Millisecond, 6 * time.Second},
					{"the delay", times[delayed][0].Sub(put), 650 * time.Millisecond, 6 * time.Second},
				} {
					if w.took < w.low || w.took > w.high {
						t.Errorf("%s came after %v, want %v to %v", w.what, w.took, w.low, w.high)
					}
				}
			})
		}
	}
}

// A lease that is taken, or renewed, late in a long transaction is of full length from that moment on, and so is the wait for a retry.
func TestLateInALongTransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode, RetryDelay: 4 * time.Second})
			conn := connect(t, dsn)
			produced(t, c, "t", keyed(16, 1)...)
			// The head is settled before, as a transaction that has written cannot prove its own.
			first := claimOne(t, conn, "t", "g", "before", 1, "1 hour")
			tx := start(t, connect(t, dsn))
			execute(t, tx, "select pg_current_xact_id(), pg_sleep(1.2)")
			left := func(what string, low, high float64) {
				t.Helper()
				s := value[float64](t, tx, `
					select extract(epoch from greatest(
					    (select max(l.expires_at) from weir.lease as l where l.consumer = 'late'),
					    (select max(d.due_at) from weir.delivery as d where d.consumer = 'late' or d.state = 'ready' and d.errors <> '[]')
					) - clock_timestamp())::float8`)
				if s < low || s > high {
					t.Errorf("%s ends in %.3f s, want %v to %v", what, s, low, high)
				}
			}
			late := claim(t, tx, "t", "g", "late", 1, "2 s")
			if len(late) != 1 || late[0].ID == first.ID {
				t.Fatalf("claimed %v after %v", late, first)
			}
			left("a lease", 1.5, 2.001)
			execute(t, tx, "select pg_sleep(0.7)")
			if !value[bool](t, tx, "select weir.extend($1, 'late', '3 s')", late[0].ID) {
				t.Error("the renewal was refused")
			}
			left("a renewed lease", 2.5, 3.001)
			id := value[int64](t, tx, "select id from weir.fetch($1)", late[0].ID)
			if !value[bool](t, tx, "select weir.fail($1, 'late', $2, 'no')", late[0].ID, id) {
				t.Error("the failure was refused")
			}
			if mode != weir.Queue && !ack(t, tx, late[0].ID, "late") {
				t.Error("the acknowledgement was refused")
			}
			left("the wait for a retry", 1.5, 4.001)
			noError(t, tx.Commit(t.Context()))
		})
	}
}

// TestAckOfMixture: messages of which some were acknowledged before and others not, as when a batch is tried again after a commit
// whose outcome did not arrive, and in other company, are refused as a whole: to say yes would commit the effects of the first twice.
func TestAckOfMixture(t *testing.T) {
	t.Parallel()
	for _, mode := range []weir.Mode{weir.Stream, weir.Ordered} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			conn := connect(t, dsn)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode})
			list := numbers(3)
			for i := range list {
				list[i].Key = "k" // one shard, and so one lease
			}
			ids := produced(t, c, "t", list...)
			lease := claimOne(t, conn, "t", "g", "c", 10, "1 hour")
			acknowledge := func(ids ...int64) (held *bool, err error) {
				err = conn.QueryRow(t.Context(), "select weir.ack_messages($1, 'c', $2)", lease.ID, ids).Scan(&held)
				return held, err
			}
			held, err := acknowledge(ids[0])
			if noError(t, err); held == nil || !*held {
				t.Fatal("a message of the lease is not acknowledged")
			}
			if held, err = acknowledge(ids[0]); err != nil || held != nil {
				t.Errorf("one that was acknowledged before: %v, %v, want null", held, err)
			}
			var pg *pgconn.PgError
			if _, err = acknowledge(ids[0], ids[1]); !errors.As(err, &pg) || pg.Code != "WE003" {
				t.Errorf("one that was and one that was not: %v, want WE003", err)
			}
			held, err = acknowledge(ids[1], ids[2])
			if noError(t, err); held == nil || !*held {
				t.Error("nothing was recorded of the mixture, and yet what was new in it is not acknowledged afterwards")
			}
		})
	}
}
