package weir_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// claimed is a lease as weir.claim gives it.
type claimed struct {
	ID, Low, High int64
	Attempt       int
}

func claim(t *testing.T, q querier, topic, group, consumer string, messages int, lease string) []claimed {
	t.Helper()
	rows, err := q.Query(t.Context(), "select * from weir.claim($1, $2, $3, $4, $5::text::interval)", topic, group, consumer, messages, lease)
	noError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[claimed])
	noError(t, err)
	return list
}

// claimOne claims, and demands that it gives one lease.
func claimOne(t *testing.T, q querier, topic, group, consumer string, messages int, lease string) claimed {
	t.Helper()
	var list []claimed
	// Writers of other tests on the same server may hold up the fence for a moment.
	eventually(t, "there is something to claim", func() bool {
		list = claim(t, q, topic, group, consumer, messages, lease)
		return len(list) > 0
	})
	if len(list) != 1 {
		t.Fatalf("claim gave %v, want one lease", list)
	}
	return list[0]
}

func ack(t *testing.T, q querier, lease int64, consumer string) bool {
	t.Helper()
	return value[bool](t, q, "select weir.ack($1, $2)", lease, consumer)
}

// lapsed waits until a lease has expired by the server's clock.
func lapsed(t *testing.T, q querier, lease int64) {
	t.Helper()
	eventually(t, "the lease expires", func() bool {
		return value[bool](t, q, `
			select exists (select from weir.lease where id = $1 and expires_at <= clock_timestamp())
			    or exists (select from weir.delivery where lease_id = $1 and due_at <= clock_timestamp())`, lease)
	})
}

// expire ends all leases of ranges at once, as if their time had passed.
func expire(t *testing.T, q querier) {
	t.Helper()
	execute(t, q, "update weir.lease set expires_at = clock_timestamp()")
}

// start begins a transaction that is rolled back at the test's end.
func start(t *testing.T, conn *pgx.Conn) pgx.Tx {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	noError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// A holder acknowledges in time, but its commit comes after the lease's end: whoever looks meanwhile sees an expired lease.
func TestTakeoverAfterFinish(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(10)...)
	a, b := connect(t, dsn), connect(t, dsn)
	lease := claimOne(t, a, "t", "g", "a", 10, "2 s")
	tx := start(t, a)
	if !ack(t, tx, lease.ID, "a") {
		t.Fatal("an acknowledgement in time was refused")
	}
	lapsed(t, b, lease.ID)
	execute(t, b, "set lock_timeout = '5 s'") // b waits for nothing
	if got := claim(t, b, "t", "g", "b", 10, "15 s"); len(got) > 0 {
		t.Errorf("b claimed %v, which a had acknowledged", got)
	}
	noError(t, tx.Commit(t.Context()))
	if got := claim(t, b, "t", "g", "b", 10, "15 s"); len(got) > 0 {
		t.Errorf("b claimed %v after it was acknowledged", got)
	}
	if g := group(t, c, "t", "g"); g.Committed != 10 || g.Leases != 0 || g.Retrying != 0 {
		t.Errorf("group is %+v, want all ten committed", g)
	}
}

// The same with an extension: the lease goes on, nobody else has it.
func TestTakeoverAfterExtension(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(10)...)
	a, b := connect(t, dsn), connect(t, dsn)
	lease := claimOne(t, a, "t", "g", "a", 10, "2 s")
	tx := start(t, a)
	if !value[bool](t, tx, "select weir.extend($1, 'a', '1 hour')", lease.ID) {
		t.Fatal("an extension in time was refused")
	}
	lapsed(t, b, lease.ID)
	execute(t, b, "set lock_timeout = '5 s'")
	if got := claim(t, b, "t", "g", "b", 10, "15 s"); len(got) > 0 {
		t.Errorf("b claimed %v, which a was extending", got)
	}
	noError(t, tx.Commit(t.Context()))
	if got := claim(t, b, "t", "g", "b", 10, "15 s"); len(got) > 0 {
		t.Errorf("b claimed %v, which a has extended", got)
	}
	if !ack(t, a, lease.ID, "a") {
		t.Error("the acknowledgement of an extended lease was refused")
	}
}

// A holder finishes after its lease was taken over, before and after that has committed: nothing of it counts.
func TestFinishAfterTakeover(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(10)...)
	a, b := connect(t, dsn), connect(t, dsn)
	execute(t, a, "set lock_timeout = '5 s'")
	lease := claimOne(t, a, "t", "g", "a", 10, "15 s")
	expire(t, b)
	tx := start(t, b)
	second := claimOne(t, tx, "t", "g", "b", 10, "1 hour")
	if second.ID == lease.ID || second.Low != lease.Low || second.High != lease.High || second.Attempt != 2 {
		t.Fatalf("b took over %+v, a had %+v", second, lease)
	}
	late := func(when string) {
		t.Helper()
		if ack(t, a, lease.ID, "a") {
			t.Errorf("%s: a late acknowledgement was taken", when)
		}
		if value[bool](t, a, "select weir.extend($1, 'a', '1 hour')", lease.ID) {
			t.Errorf("%s: a late extension was taken", when)
		}
		if value[bool](t, a, "select weir.fail($1, 'a', 3, 'late')", lease.ID) {
			t.Errorf("%s: a late failure was taken", when)
		}
		if value[bool](t, a, "select weir.release($1, 'a')", lease.ID) {
			t.Errorf("%s: a late release was taken", when)
		}
	}
	late("takeover in flight")
	noError(t, tx.Commit(t.Context()))
	late("takeover committed")
	// Neither does the old holder's name open the new lease, nor the new holder's the old one.
	if ack(t, a, second.ID, "a") || ack(t, b, lease.ID, "b") {
		t.Error("a lease was acknowledged by another's name or number")
	}
	if g := group(t, c, "t", "g"); g.Committed != 0 || g.Leases != 1 || g.Retrying != 0 {
		t.Errorf("group is %+v, want one lease and nothing committed", g)
	}
	if !ack(t, b, second.ID, "b") {
		t.Error("the new holder's acknowledgement was refused")
	}
	if g := group(t, c, "t", "g"); g.Committed != 10 || g.Leases != 0 {
		t.Errorf("group is %+v, want all ten committed", g)
	}
}

// The same two of a message that is retried.
func TestFinishAfterTakeoverOfDelivery(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: -1})
	produced(t, c, "t", numbers(1)...)
	a, b := connect(t, dsn), connect(t, dsn)
	lease := claimOne(t, a, "t", "g", "a", 10, "15 s")
	if !value[bool](t, a, "select weir.fail($1, 'a', 1, 'no')", lease.ID) || !ack(t, a, lease.ID, "a") {
		t.Fatal("not taken")
	}
	lease = claimOne(t, a, "t", "g", "a", 10, "15 s")
	execute(t, a, "update weir.delivery set due_at = clock_timestamp()")
	tx := start(t, b)
	second := claimOne(t, tx, "t", "g", "b", 10, "1 hour")
	execute(t, a, "set lock_timeout = '5 s'")
	for _, when := range []string{"in flight", "committed"} {
		if ack(t, a, lease.ID, "a") || value[bool](t, a, "select weir.fail($1, 'a', 1, 'late')", lease.ID) {
			t.Errorf("takeover %s: the former holder was heard", when)
		}
		if when == "in flight" {
			noError(t, tx.Commit(t.Context()))
		}
	}
	if second.Attempt != 3 || !ack(t, b, second.ID, "b") {
		t.Errorf("takeover is %+v, want attempt 3 and an acknowledgement", second)
	}
	if g := group(t, c, "t", "g"); g.Retrying != 0 || g.Dead != 0 || g.Committed != 1 {
		t.Errorf("group is %+v, want nothing left", g)
	}
}

// A consumer whose lease is taken over while its handler runs: the handler's context says so, and what it did is not counted.
func TestConsumerLosesLease(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(3)...)
	other := connect(t, dsn)
	began, cause := make(chan struct{}), make(chan error, 1)
	k := consume(t, c, "t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
		close(began) // a second call panics
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return nil
	}), &weir.ConsumerOptions{Lease: time.Second, Prefetch: 3})
	<-began
	tx := start(t, other)
	expire(t, tx)
	taken := claimOne(t, tx, "t", "g", "other", 10, "1 hour")
	noError(t, tx.Commit(t.Context()))
	if err := <-cause; !errors.Is(err, weir.ErrLeaseLost) {
		t.Errorf("the handler's context ended with %v, want ErrLeaseLost", err)
	}
	eventually(t, "the loss is counted", func() bool { return k.Stats().Lost == 1 && k.Stats().Buffered == 0 })
	k.stop()
	if !ack(t, other, taken.ID, "other") {
		t.Error("the new holder lost the lease")
	}
	if g := group(t, c, "t", "g"); g.Committed != 3 {
		t.Errorf("group is %+v, want three committed", g)
	}
}

func TestHungHandler(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: -1})
	ids := produced(t, c, "t", numbers(20)...)
	handled, release := newTally(), make(chan struct{})
	var attempt atomic.Int64
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if m.Value == 3 && m.Attempt == 1 {
			<-release
			return nil
		}
		if m.Value == 3 {
			attempt.Store(int64(m.Attempt))
		}
		handled.add(m.ID)
		return nil
	}), &weir.ConsumerOptions{HandlerTimeout: 200 * time.Millisecond})
	eventually(t, "the handler is visible as hung", func() bool { return k.Stats().Hung == 1 })
	eventually(t, "the others and its message are handled", func() bool { return handled.distinct() == len(ids) })
	drained(t, c, "t", "g")
	if n := handled.count(ids[2]); n != 1 || attempt.Load() != 2 {
		t.Errorf("the message was handled %d times, in attempt %d; want once, in attempt 2", n, attempt.Load())
	}
	if s := k.Stats(); s.Hung != 1 || s.Handled != 20 || s.Failed != 1 || s.Lost != 0 || s.Buffered != 0 || s.Executing != 0 {
		t.Errorf("stats are %+v", s)
	}
	close(release)
	eventually(t, "nothing hangs any more", func() bool { return k.Stats().Hung == 0 })
	if s := k.Stats(); s.Handled != 20 {
		t.Errorf("the return of a hung handler counted: %+v", s)
	}
}

// With no time limit a hung handler keeps its own place and message only.
func TestHungHandlerWithoutLimit(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	ids := produced(t, c, "t", numbers(100)...)
	handled, release := newTally(), make(chan struct{})
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if m.Value == 3 {
			<-release
		}
		handled.add(m.ID)
		return nil
	}), &weir.ConsumerOptions{HandlerTimeout: -1, Concurrency: 2, Lease: time.Second})
	eventually(t, "the others are handled", func() bool { return handled.distinct() == len(ids)-1 })
	if s := k.Stats(); s.Executing != 1 || s.Buffered != 1 || s.Hung != 0 {
		t.Errorf("stats are %+v", s)
	}
	close(release)
	drained(t, c, "t", "g")
	if k.Stats().Lost != 0 || handled.distinct() != len(ids) {
		t.Errorf("%d handled, stats are %+v", handled.distinct(), k.Stats())
	}
}

func TestLongWorkRenewsItsLease(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(1)...)
	conn := connect(t, dsn)
	began, release := make(chan struct{}), make(chan struct{})
	var calls, attempt atomic.Int64
	o := &weir.ConsumerOptions{Lease: time.Second}
	handler := weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if calls.Add(1) == 1 {
			close(began)
		}
		attempt.Store(int64(m.Attempt))
		<-release
		return nil
	})
	k := consume(t, c, "t", "g", handler, o)
	rival := consume(t, c, "t", "g", handler, o)
	<-began
	eventually(t, "four leases' length has passed", func() bool {
		return value[bool](t, conn, "select clock_timestamp() > claimed_at + interval '4 s' from weir.lease")
	})
	close(release)
	drained(t, c, "t", "g")
	if calls.Load() != 1 || attempt.Load() != 1 || k.Stats().Lost+rival.Stats().Lost != 0 {
		t.Errorf("%d calls, attempt %d, stats %+v and %+v; want one attempt", calls.Load(), attempt.Load(), k.Stats(), rival.Stats())
	}
}

func TestLateAcknowledgementIsRefused(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(2)...)
	conn := connect(t, dsn)
	lease := claimOne(t, conn, "t", "g", "slow", 10, "100 ms")
	lapsed(t, conn, lease.ID)
	// Nobody has taken it over: it is lost nevertheless.
	if ack(t, conn, lease.ID, "slow") ||
		value[bool](t, conn, "select weir.extend($1, 'slow', '1 hour')", lease.ID) ||
		value[bool](t, conn, "select weir.fail($1, 'slow', 1, 'late')", lease.ID) ||
		value[bool](t, conn, "select weir.release($1, 'slow')", lease.ID) {
		t.Error("the holder of an expired lease was heard")
	}
	again := claimOne(t, conn, "t", "g", "next", 10, "15 s")
	if again.Attempt != 2 || again.Low != lease.Low || again.High != lease.High {
		t.Errorf("taken over: %+v, was %+v", again, lease)
	}
}

func TestUndecodableMessage(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	messages := numbers(10)
	messages[1] = weir.Message{Key: "k", Headers: map[string]string{"a": "b"}, Payload: "no number"}
	ids := produced(t, c, "t", messages...)
	handled := newTally()
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		handled.add(m.ID)
		return nil
	}), nil)
	eventually(t, "nine are handled", func() bool { return handled.distinct() == 9 })
	drained(t, c, "t", "g")
	dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 10)
	noError(t, err)
	if len(dead) != 1 {
		t.Fatalf("%d dead letters, want one", len(dead))
	}
	d := dead[0]
	if d.ID != ids[1] || d.Attempt != 1 || string(d.Raw) != `"no number"` || d.Key != "k" || d.Headers["a"] != "b" ||
		!strings.Contains(d.Error, "decode payload") || len(d.Errors) != 1 {
		t.Errorf("dead letter is %+v", d)
	}
	if handled.count(ids[1]) != 0 || k.Stats().Handled != 9 {
		t.Errorf("the undecodable message was handled; stats are %+v", k.Stats())
	}
}

func TestSerializationFailureIsNotTheMessagesFault(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 1, RetryDelay: -1})
	produced(t, c, "t", numbers(3)...)
	conn := connect(t, dsn)
	var mu sync.Mutex
	calls, attempts := map[int]int{}, map[int]int{}
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		mu.Lock()
		defer mu.Unlock()
		calls[m.Value]++
		attempts[m.Value] = max(attempts[m.Value], m.Attempt)
		// The second is over within one execution, the third only in the second one.
		if limit := []int{0, 0, 2, 6}[m.Value]; calls[m.Value] <= limit {
			return fmt.Errorf("storing: %w", &pgconn.PgError{Code: "40001", Message: "could not serialize access"})
		}
		return nil
	}), nil)
	eventually(t, "all are handled", func() bool { return k.Stats().Handled == 3 })
	drained(t, c, "t", "g")
	mu.Lock()
	defer mu.Unlock()
	if calls[1] != 1 || calls[2] != 3 || calls[3] != 7 || attempts[1] != 1 || attempts[2] != 1 || attempts[3] != 1 {
		t.Errorf("calls %v, attempts %v", calls, attempts)
	}
	if n := value[int](t, conn, "select count(*) from weir.delivery"); n != 0 {
		t.Errorf("%d deliveries are left", n)
	}
}

// child runs this test binary as another process.
func child(t *testing.T, name string, env ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	noError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), childEnv+"="+name), env...)
	cmd.Stderr = os.Stderr
	return cmd
}

// childFail ends a child that cannot do its part.
func childFail(err error) {
	fmt.Fprintln(os.Stderr, "child:", err)
	os.Exit(3)
}

func init() {
	// Consumes topic t as group g, notes what it has handled, and dies of message 5 in the way that HOW says.
	children["poison"] = func() {
		ctx := context.Background()
		c, err := weir.Open(ctx, os.Getenv("DSN"), nil)
		if err != nil {
			childFail(err)
		}
		conn, err := pgx.Connect(ctx, os.Getenv("DSN"))
		if err != nil {
			childFail(err)
		}
		k, err := c.NewConsumer("t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
			if m.Value == 5 {
				if os.Getenv("HOW") == "kill" {
					_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
					select {}
				}
				os.Exit(1)
			}
			_, err := conn.Exec(ctx, "insert into handled values ($1)", m.ID)
			return err
		}), &weir.ConsumerOptions{Lease: 500 * time.Millisecond, PollInterval: 20 * time.Millisecond})
		if err != nil {
			childFail(err)
		}
		childFail(k.Run(ctx))
	}
	// Consumes topic t as group g, prints each message and stays with the fourth for ever.
	children["stuck"] = func() {
		ctx := context.Background()
		c, err := weir.Open(ctx, os.Getenv("DSN"), nil)
		if err != nil {
			childFail(err)
		}
		k, err := c.NewConsumer("t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			fmt.Println(m.Value)
			if m.Value == 4 {
				select {}
			}
			return nil
		}), &weir.ConsumerOptions{Lease: 2 * time.Second})
		if err != nil {
			childFail(err)
		}
		childFail(k.Run(ctx))
	}
}

// A message that takes its process down is dead after the group's attempts; its neighbours, whatever their place, are not.
func TestPoisonousMessage(t *testing.T) {
	for _, how := range []string{"exit", "kill"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 3, RetryDelay: -1})
			ids := produced(t, c, "t", numbers(10)...)
			conn := connect(t, dsn)
			execute(t, conn, "create table handled (id bigint)")
			deaths := 0
			for deadline := time.Now().Add(time.Minute); ; {
				cmd := child(t, "poison", "DSN="+dsn, "HOW="+how)
				noError(t, cmd.Start())
				ended := make(chan error, 1)
				go func() { ended <- cmd.Wait() }()
				done := false
				for alive := true; alive; {
					select {
					case <-ended:
						alive = false
						deaths++
					case <-time.After(10 * time.Millisecond):
						g := group(t, c, "t", "g")
						done = g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Waiting == 0 && g.Dead > 0
						if done || time.Now().After(deadline) {
							_ = cmd.Process.Kill()
							<-ended
							alive = false
						}
					}
				}
				if done {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("not done after %d deaths: %+v", deaths, group(t, c, "t", "g"))
				}
			}
			dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 10)
			noError(t, err)
			for _, d := range dead {
				if d.ID != ids[4] {
					t.Errorf("a neighbour is dead: message %d, %+v", d.ID, d.Errors)
				} else if d.Attempt != 3 || !strings.Contains(d.Error, "lease expired") {
					t.Errorf("dead letter is %+v", d)
				}
			}
			if deaths != 3 {
				t.Errorf("the message took %d processes down, want 3", deaths)
			}
			handled := column[int64](t, conn, "select distinct id from handled order by id")
			want := slices.Delete(slices.Clone(ids), 4, 5)
			if !slices.Equal(handled, want) {
				t.Errorf("handled are %v, want %v", handled, want)
			}
		})
	}
}

// Of the retries that a dead process held, the next ones get one each at a time, and only one that was held so is dead when
// its last attempt expires too.
func TestSuspectsAreHandedOutOneAtATime(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 2, RetryDelay: -1})
	ids := produced(t, c, "t", numbers(4)...)
	conn := connect(t, dsn)
	first := claimOne(t, conn, "t", "g", "a", 10, "1 hour")
	for _, id := range ids {
		if !value[bool](t, conn, "select weir.fail($1, 'a', $2, 'no')", first.ID, id) {
			t.Fatal("a failure was refused")
		}
	}
	if !ack(t, conn, first.ID, "a") {
		t.Fatal("the acknowledgement was refused")
	}
	if got := claim(t, conn, "t", "g", "a", 10, "1 hour"); len(got) != 4 || got[0].Attempt != 2 {
		t.Fatalf("a claimed %+v, want four last attempts", got)
	}
	lapse := func() {
		t.Helper()
		execute(t, conn, "update weir.delivery set due_at = clock_timestamp() where state = 'leased'")
	}
	lapse()
	b := claimOne(t, conn, "t", "g", "b", 10, "1 hour")
	if b.Attempt != 2 {
		t.Errorf("b claimed %+v, want attempt 2 again", b)
	}
	if got := claim(t, conn, "t", "g", "b", 10, "1 hour"); len(got) != 0 {
		t.Errorf("b, which has one, claimed %+v too", got)
	}
	other := claimOne(t, conn, "t", "g", "c", 10, "1 hour")
	if other.High == b.High {
		t.Errorf("c claimed %+v, which b has", other)
	}
	if !ack(t, conn, b.ID, "b") {
		t.Error("b's acknowledgement was refused")
	}
	b = claimOne(t, conn, "t", "g", "b", 10, "1 hour")
	// A failure is told apart from a death: the message is dead with its own error.
	if !value[bool](t, conn, "select weir.fail($1, 'b', $2, 'its own')", b.ID, b.High) {
		t.Error("b's failure was refused")
	}
	lapse() // c dies with its one
	last := claimOne(t, conn, "t", "g", "b", 10, "1 hour")
	if last.High == b.High || last.High == other.High || !ack(t, conn, last.ID, "b") {
		t.Errorf("b claimed %+v, want the one that is left", last)
	}
	dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 10)
	noError(t, err)
	if len(dead) != 2 {
		t.Fatalf("dead letters are %+v, want two", dead)
	}
	for _, d := range dead {
		want := map[int64]string{b.High: "its own", other.High: "its lease expired"}[d.ID]
		if want == "" || !strings.Contains(d.Error, want) || d.Attempt != 2 {
			t.Errorf("dead letter is %+v, want %q", d, want)
		}
	}
	if g := group(t, c, "t", "g"); g.Retrying != 0 {
		t.Errorf("group is %+v, want nothing left", g)
	}
}

func TestCrashedConsumersWorkIsTakenOver(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	ids := produced(t, c, "t", numbers(10)...)
	cmd := child(t, "stuck", "DSN="+dsn)
	out, err := cmd.StdoutPipe()
	noError(t, err)
	noError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for i := 1; i <= 4; i++ {
		if !lines.Scan() || lines.Text() != fmt.Sprint(i) {
			t.Fatalf("the child printed %q, want %d", lines.Text(), i)
		}
	}
	handled := newTally()
	consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if m.Attempt != 2 {
			t.Errorf("message %d comes in attempt %d, want 2", m.ID, m.Attempt)
		}
		handled.add(m.ID)
		return nil
	}), nil)
	noError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	took := within(t, 10*time.Second, "all are handled", func() bool { return handled.distinct() == len(ids) })
	t.Logf("taken over %v after the death, with a lease of 2 s", took.Round(time.Millisecond))
	drained(t, c, "t", "g")
}

func TestAlwaysFailing(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 4, RetryDelay: 10 * time.Millisecond, RetryMax: 20 * time.Millisecond})
	ids := produced(t, c, "t", numbers(50)...)
	handled := newTally()
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if m.Value == 3 || m.Value == 30 {
			return fmt.Errorf("try %d of %d: \x00 and \xff", m.Attempt, m.Value)
		}
		handled.add(m.ID)
		return nil
	}), nil)
	eventually(t, "two are dead", func() bool { return group(t, c, "t", "g").Dead == 2 })
	drained(t, c, "t", "g")
	if n := handled.distinct(); n != 48 || handled.calls() != 48 {
		t.Errorf("%d handled in %d calls, want 48", n, handled.calls())
	}
	for _, i := range []int{3, 30} {
		d, err := c.DeadLetter(t.Context(), "t", "g", ids[i-1])
		noError(t, err)
		if d.Attempt != 4 || len(d.Errors) != 4 || d.Error != d.Errors[3].Error || string(d.Raw) != fmt.Sprint(i) {
			t.Errorf("dead letter is %+v", d)
		}
		for n, e := range d.Errors {
			if want := fmt.Sprintf("try %d of %d: \uFFFD and \uFFFD", n+1, i); e.Error != want || e.Attempt != n+1 || e.At.IsZero() {
				t.Errorf("error of attempt %d is %+v, want %q", n+1, e, want)
			}
		}
	}
	if s := k.Stats(); s.Failed != 8 || s.Handled != 48 || s.Lost != 0 {
		t.Errorf("stats are %+v, want 8 failed, 48 handled, none lost", s)
	}
	// Another life, and a better handler.
	k.stop()
	n, err := c.Redrive(t.Context(), "t", "g", 0)
	if err != nil || n != 2 {
		t.Fatalf("redrive gave %d, %v", n, err)
	}
	consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if m.Attempt != 1 {
			t.Errorf("message %d comes in attempt %d after a redrive", m.ID, m.Attempt)
		}
		handled.add(m.ID)
		return nil
	}), nil)
	drained(t, c, "t", "g")
	if missing := handled.missing(ids); len(missing) > 0 {
		t.Errorf("not handled: %v", missing)
	}
}

// Stopping with a handler that finishes, one that heeds its context and one that hangs.
func TestStop(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 2})
	ids := produced(t, c, "t", numbers(6)...)
	conn := connect(t, dsn)
	pool := newPool(t, dsn, nil)
	own, err := weir.New(pool, &weir.Options{Logger: newTestLog(t).Logger})
	noError(t, err)
	var began sync.WaitGroup
	began.Add(3)
	consumer, release := make(chan *weir.Consumer, 1), make(chan struct{})
	defer close(release)
	cause := make(chan error, 1)
	k, err := own.NewConsumer("t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
		began.Done() // a fourth call panics
		switch m.Value {
		case 1: // until the stop has begun, which gives up what waits
			for k := <-consumer; k.Stats().Buffered > 3; {
				time.Sleep(time.Millisecond)
			}
		case 2:
			<-ctx.Done()
			cause <- context.Cause(ctx)
			return ctx.Err()
		case 3:
			<-release
		}
		return nil
	}), &weir.ConsumerOptions{Concurrency: 3, StopTimeout: 300 * time.Millisecond, Lease: time.Hour})
	noError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	began.Wait()
	consumer <- k
	cancel()
	at := time.Now()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	took := time.Since(at)
	own.Close()
	pool.Close()
	t.Logf("stopped after %v, with a time limit of 300 ms", took.Round(time.Millisecond))
	if took > 10*time.Second {
		t.Errorf("stopping took %v", took)
	}
	if err := <-cause; !errors.Is(err, weir.ErrStopped) {
		t.Errorf("the second handler's context ended with %v, want ErrStopped", err)
	}
	if s := k.Stats(); s.Handled != 1 || s.Failed != 0 || s.Lost != 0 || s.Hung != 1 || s.Buffered != 0 || s.Executing != 0 {
		t.Errorf("stats are %+v", s)
	}
	// The pool is closed, and nothing is left to do: what is handled is settled, the rest is there for the next.
	if n := value[int](t, conn, "select count(*) from weir.lease where expires_at > clock_timestamp()"); n != 0 {
		t.Errorf("%d leases are still held", n)
	}
	next := claimOne(t, conn, "t", "g", "next", 10, "15 s")
	if next.Attempt != 1 || next.Low != 0 || next.High != ids[5] {
		t.Errorf("the next consumer gets %+v, want attempt 1 of the range", next)
	}
	if got := column[int64](t, conn, "select id from weir.fetch($1)", next.ID); !slices.Equal(got, ids[1:]) {
		t.Errorf("the next consumer gets %v, want %v", got, ids[1:])
	}
}

// Everything that was handled before the stop is acknowledged when Run has returned.
func TestStopAcknowledges(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn := connect(t, dsn)
	var all []int64
	handled := newTally()
	for round := range 10 {
		all = append(all, produced(t, c, "t", numbers(300)...)...)
		k := consume(t, c, "t", "g", handleInto(handled), &weir.ConsumerOptions{Concurrency: 3, Lease: time.Hour})
		eventually(t, "some are handled", func() bool { return k.Stats().Handled >= int64(50+13*round) })
		k.stop()
		if n := value[int](t, conn, "select count(*) from weir.lease where expires_at > clock_timestamp()"); n != 0 {
			t.Errorf("%d leases are held after the stop", n)
		}
	}
	consume(t, c, "t", "g", handleInto(handled), &weir.ConsumerOptions{Concurrency: 3})
	drained(t, c, "t", "g")
	if missing := handled.missing(all); len(missing) > 0 || handled.calls() != len(all) {
		t.Errorf("%d of %d were not handled, %d calls", len(missing), len(all), handled.calls())
	}
}

func TestStartStopLeavesNothing(t *testing.T) {
	// Not parallel: it counts the goroutines of the process.
	dsn := pgtest.Shared(t).Database(t)
	conn := connect(t, dsn)
	setup := openDSN(t, dsn, &weir.Options{NoListen: true})
	topicAndGroup(t, setup, "t", "g", nil, nil)
	setup.Close()
	before := runtime.NumGoroutine()
	handled := newTally()
	var all []int64
	for i := range 100 {
		c, err := weir.Open(t.Context(), dsn, nil)
		noError(t, err)
		k, err := c.NewConsumer("t", "g", handleInto(handled), &weir.ConsumerOptions{Concurrency: 3})
		noError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- k.Run(ctx) }()
		ids := produced(t, c, "t", numbers(3)...)
		all = append(all, ids...)
		switch i % 3 { // stopped at work, at rest, and at once
		case 0:
			eventually(t, "one is handled", func() bool { return handled.count(ids[0]) > 0 })
		case 1:
			eventually(t, "all are handled", func() bool { return len(handled.missing(all)) == 0 })
		}
		cancel()
		if err := <-ended; err != nil {
			t.Fatalf("Run: %v", err)
		}
		c.Close()
	}
	if !waitUntil(10*time.Second, func() bool { return runtime.NumGoroutine() <= before }) {
		stacks := make([]byte, 1<<20)
		t.Errorf("%d goroutines, there were %d:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
	}
	eventually(t, "no connection is left", func() bool {
		return value[int](t, conn, "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'") == 0
	})
	if n := value[int](t, conn, "select count(*) from weir.lease where expires_at > clock_timestamp()"); n != 0 {
		t.Errorf("%d leases are held", n)
	}
	if n := value[int](t, conn, "select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())"); n != 0 {
		t.Errorf("%d advisory locks are held", n)
	}
}

func waitUntil(d time.Duration, cond func() bool) bool {
	for deadline := time.Now().Add(d); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// Claims of racing workers are disjoint, and miss nothing.
func TestRacingClaims(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000}, nil)
	const total = 6000
	produced(t, c, "t", numbers(total)...)
	var mu sync.Mutex
	var ranges []claimed
	var fetched []int64
	var work sync.WaitGroup
	for w := range 8 {
		conn := connect(t, dsn)
		name := fmt.Sprint("worker ", w)
		work.Go(func() {
			ctx := t.Context()
			fail := func(err error) { t.Errorf("%s: %v", name, err) }
			for {
				mu.Lock()
				done := len(fetched) == total
				mu.Unlock()
				if done || ctx.Err() != nil || t.Failed() {
					return
				}
				rows, err := conn.Query(ctx, "select * from weir.claim('t', 'g', $1, $2, '1 hour')", name, 1+rand.IntN(60))
				if err != nil {
					fail(err)
					return
				}
				list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[claimed])
				if err != nil {
					fail(err)
					return
				}
				for _, l := range list {
					rows, err := conn.Query(ctx, "select id from weir.fetch($1)", l.ID)
					if err != nil {
						fail(err)
						return
					}
					ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
					if err != nil {
						fail(err)
						return
					}
					mu.Lock()
					ranges = append(ranges, l)
					fetched = append(fetched, ids...)
					mu.Unlock()
					if rand.IntN(2) == 0 {
						continue // some stay held
					}
					if tag, err := conn.Exec(ctx, "select where weir.ack($1, $2)", l.ID, name); err != nil || tag.RowsAffected() != 1 {
						fail(fmt.Errorf("ack: %v, %w", tag, err))
						return
					}
				}
			}
		})
	}
	work.Wait()
	slices.SortFunc(ranges, func(a, b claimed) int { return int(a.Low - b.Low) })
	at := int64(0)
	for _, r := range ranges {
		if r.Low < at || r.High <= r.Low || r.Attempt != 1 {
			t.Fatalf("range %+v begins before %d", r, at)
		}
		at = r.High
	}
	slices.Sort(fetched)
	for i, id := range fetched {
		if id != int64(i+1) {
			t.Fatalf("message %d is the %d. that was fetched", id, i+1)
		}
	}
	if len(fetched) != total {
		t.Errorf("%d fetched, want %d", len(fetched), total)
	}
}

// Expired work that a peer has locked is not waited for: there may be fresh work.
func TestTakeoverSkipsWhatAPeerHas(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: -1})
	produced(t, c, "t", numbers(30)...)
	a, b := connect(t, dsn), connect(t, dsn)
	first := claimOne(t, a, "t", "g", "dead", 10, "1 hour")
	second := claimOne(t, a, "t", "g", "dead", 10, "1 hour")
	// One message has a delivery of its own, which is due.
	if !value[bool](t, a, "select weir.fail($1, 'dead', 3, 'no')", first.ID) {
		t.Fatal("the failure was refused")
	}
	expire(t, a)
	tx := start(t, a)
	execute(t, tx, "select from weir.lease for update")
	execute(t, tx, "select from weir.delivery for update")
	execute(t, b, "set lock_timeout = '5 s'")
	if got := claimOne(t, b, "t", "g", "b", 10, "1 hour"); got.Low != second.High || got.Attempt != 1 {
		t.Errorf("claimed %+v, want fresh work after %d", got, second.High)
	}
	if got := claim(t, b, "t", "g", "b", 10, "1 hour"); len(got) != 0 {
		t.Errorf("claimed %+v, want nothing", got)
	}
	// A peer that has one of them leaves the other.
	noError(t, tx.Commit(t.Context()))
	tx = start(t, a)
	execute(t, tx, "select from weir.lease where id = $1 for update", first.ID)
	if got := claimOne(t, b, "t", "g", "b", 10, "1 hour"); got.Low != second.Low || got.Attempt != 2 {
		t.Errorf("took over %+v, want the second range", got)
	}
	if got := claimOne(t, b, "t", "g", "b", 10, "1 hour"); got.High != 3 || got.Attempt != 2 {
		t.Errorf("claimed %+v, want the retry", got)
	}
	noError(t, tx.Commit(t.Context()))
	if got := claimOne(t, b, "t", "g", "b", 10, "1 hour"); got.Low != first.Low || got.Attempt != 2 {
		t.Errorf("took over %+v, want the first range", got)
	}
}

// Four producers at full speed and a consumer: every message is handled, and nothing else.
func TestFullSpeed(t *testing.T) {
	total := 100_000
	if os.Getenv("WEIR_LONG") != "" {
		total = 1_100_000
	}
	t.Parallel()
	c, _ := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), nil)
	topicAndGroup(t, c, "t", "g", &weir.TopicOptions{Format: weir.Bytes}, nil)
	const producers, batch = 4, 250
	each := total / producers / batch
	total = each * producers * batch
	times := make([]atomic.Int32, total)
	var distinct, foreign atomic.Int64
	began := time.Now()
	consume(t, c, "t", "g", weir.HandleBatch(func(_ context.Context, messages []*weir.Received[[]byte]) error {
		for _, m := range messages {
			var n int
			if _, err := fmt.Sscanf(string(m.Value), "%d", &n); err != nil || n < 0 || n >= total {
				foreign.Add(1)
			} else if times[n].Add(1) == 1 {
				distinct.Add(1)
			}
		}
		return nil
	}), &weir.ConsumerOptions{Concurrency: 2, BatchSize: 500, Prefetch: 5000})
	var work sync.WaitGroup
	for p := range producers {
		work.Go(func() {
			messages := make([]weir.Message, batch)
			for b := range each {
				for i := range messages {
					messages[i].Payload = []byte(fmt.Sprintf("%d %0100d", (p*each+b)*batch+i, 0))
				}
				if ids, err := c.Produce(t.Context(), "t", messages...); err != nil || len(ids) != batch {
					t.Errorf("produce: %d ids, %v", len(ids), err)
					return
				}
			}
		})
	}
	work.Wait()
	produced := time.Since(began)
	within(t, 10*time.Minute, "all are handled", func() bool { return t.Failed() || distinct.Load() == int64(total) })
	handled := time.Since(began)
	drained(t, c, "t", "g")
	again := 0
	for i := range times {
		if times[i].Load() != 1 {
			again++
		}
	}
	if again > 0 || foreign.Load() > 0 {
		t.Errorf("%d of %d were not handled exactly once, %d are foreign", again, total, foreign.Load())
	}
	t.Logf("%d messages: produced at %.0f/s, handled at %.0f/s", total, float64(total)/produced.Seconds(), float64(total)/handled.Seconds())
}

func TestPrefetchBounds(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	run := func(name string, size int, o weir.ConsumerOptions, limit int64) {
		topicAndGroup(t, c, name, "g", &weir.TopicOptions{Format: weir.Bytes}, &weir.GroupOptions{RetryDelay: -1})
		const total = 300
		messages := make([]weir.Message, total)
		for i := range messages {
			messages[i].Payload = make([]byte, size)
		}
		ids := produced(t, c, name, messages...)
		handled := newTally()
		var most atomic.Int64
		var k *consumption
		ready := make(chan struct{})
		k = consume(t, c, name, "g", weir.Handle(func(_ context.Context, m *weir.Received[[]byte]) error {
			<-ready
			for n := k.Stats().Buffered; ; {
				old := most.Load()
				if n <= old || most.CompareAndSwap(old, n) {
					break
				}
			}
			if m.ID%10 == 0 && m.Attempt == 1 {
				return errors.New("once more")
			}
			handled.add(m.ID)
			return nil
		}), &o)
		close(ready)
		eventually(t, name+": all are handled", func() bool { return handled.distinct() == len(ids) })
		drained(t, c, name, "g")
		t.Logf("%s: at most %d buffered, the bound is %d", name, most.Load(), limit)
		if most.Load() > limit {
			t.Errorf("%s: %d were buffered, want at most %d", name, most.Load(), limit)
		}
	}
	run("messages", 10, weir.ConsumerOptions{Prefetch: 20, Concurrency: 3}, 20)
	run("bytes", 10_000, weir.ConsumerOptions{PrefetchBytes: 65_000, Concurrency: 2}, 6)
	run("one", 10, weir.ConsumerOptions{Prefetch: 1}, 1)
	run("larger than the bound", 10_000, weir.ConsumerOptions{PrefetchBytes: 1000, Concurrency: 4}, 1)
}

func TestBatches(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: -1, MaxAttempts: 2})
	messages := numbers(100)
	messages[10].Payload = "no number"
	ids := produced(t, c, "t", messages...)
	handled := newTally()
	var largest atomic.Int64
	k := consume(t, c, "t", "g", weir.HandleBatch(func(_ context.Context, messages []*weir.Received[int]) error {
		largest.Store(max(largest.Load(), int64(len(messages))))
		some := &weir.BatchError{Failed: map[int]error{}}
		for i, m := range messages {
			switch {
			case m.Value == 20: // always
				some.Failed[i] = fmt.Errorf("try %d", m.Attempt)
			case m.Value == 30 && m.Attempt == 1:
				some.Failed[i] = errors.New("once more")
			case m.Value == 40:
				some.Failed[i] = weir.Dead(errors.New("never"))
			default:
				handled.add(m.ID)
			}
		}
		if len(some.Failed) > 0 {
			return fmt.Errorf("some: %w", some)
		}
		return nil
	}), &weir.ConsumerOptions{BatchSize: 25})
	eventually(t, "three are dead", func() bool { return group(t, c, "t", "g").Dead == 3 })
	drained(t, c, "t", "g")
	if handled.distinct() != 97 || handled.calls() != 97 || handled.count(ids[29]) != 1 {
		t.Errorf("%d handled in %d calls, want 97", handled.distinct(), handled.calls())
	}
	dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 10)
	noError(t, err)
	want := []struct {
		id      int64
		attempt int
		text    string
	}{{ids[10], 1, "decode payload"}, {ids[19], 2, "try 2"}, {ids[39], 1, "never"}}
	for i, d := range dead {
		if d.ID != want[i].id || d.Attempt != want[i].attempt || !strings.Contains(d.Error, want[i].text) {
			t.Errorf("dead letter is %+v, want %+v", d, want[i])
		}
	}
	if n := largest.Load(); n != 25 {
		t.Errorf("the largest batch had %d messages, want 25", n)
	}
	if s := k.Stats(); s.Handled != 97 || s.Failed != 5 || s.Lost != 0 {
		t.Errorf("stats are %+v", s)
	}
	// An error that names no messages is that of all.
	topicAndGroup(t, c, "u", "g", nil, &weir.GroupOptions{RetryDelay: -1})
	produced(t, c, "u", numbers(10)...)
	var calls atomic.Int64
	whole := consume(t, c, "u", "g", weir.HandleBatch(func(_ context.Context, messages []*weir.Received[int]) error {
		if calls.Add(1) == 1 {
			return errors.New("all of them")
		}
		return nil
	}), nil)
	eventually(t, "all are handled", func() bool { return whole.Stats().Handled == 10 })
	if s := whole.Stats(); s.Failed != 10 {
		t.Errorf("stats are %+v, want 10 failed", s)
	}
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: time.Hour, MaxAttempts: 3})
	ids := produced(t, c, "t", numbers(10)...)
	conn := connect(t, dsn)
	handled := newTally()
	var mu sync.Mutex
	attempts := map[int][]int{}
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		mu.Lock()
		attempts[m.Value] = append(attempts[m.Value], m.Attempt)
		n := len(attempts[m.Value])
		mu.Unlock()
		switch {
		case m.Value == 1:
			return weir.Dead(errors.New("never"))
		case m.Value == 2 && n <= 5:
			return weir.RetryIn(0, errors.New("not yet"))
		case m.Value == 3:
			return fmt.Errorf("wrapped: %w", weir.RetryIn(24*time.Hour, errors.New("tomorrow")))
		case m.Value == 4:
			return weir.RetryIn(-time.Hour, nil) // at once: out of range, but no reason to lose the neighbours
		case m.Value == 5:
			return weir.RetryIn(1<<62, errors.New("in ages"))
		case m.Value == 6:
			panic("aargh")
		case m.Value == 7:
			runtime.Goexit()
		case m.Value == 8:
			return errors.New("in an hour")
		}
		handled.add(m.ID)
		return nil
	}), nil)
	// 2 comes again until it is handled, 4 for ever.
	eventually(t, "three are handled", func() bool { return handled.distinct() == 3 })
	eventually(t, "the rest waits", func() bool { g := group(t, c, "t", "g"); return g.Retrying == 6 && g.Dead == 1 && g.Lag == 0 })
	k.stop()
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(attempts[2], []int{1, 1, 1, 1, 1, 1}) {
		t.Errorf("attempts of a postponed message are %v, want 1 each time", attempts[2])
	}
	if n := len(attempts[4]); n < 2 {
		t.Errorf("a message that is postponed by less than nothing was handled %d times, want it at once again", n)
	}
	type delivery struct {
		ID      int64
		State   string
		Attempt int
		Hours   int
		Error   string
	}
	rows, err := conn.Query(t.Context(), `
		select message_id, state, attempt, round(extract(epoch from due_at - clock_timestamp()) / 3600)::int, errors -> -1 ->> 'error'
		from weir.delivery where message_id <> 4 order by message_id`)
	noError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[delivery])
	noError(t, err)
	// The delay of the group is an hour, less up to half of it at random.
	want := []delivery{
		{ids[0], "dead", 1, -1, "never"},
		{ids[2], "ready", 0, 24, "wrapped: tomorrow"},
		{ids[4], "ready", 0, 365 * 24, "in ages"},
		{ids[5], "ready", 1, 1, "panic: aargh"},
		{ids[6], "ready", 1, 1, "runtime.Goexit"},
		{ids[7], "ready", 1, 1, "in an hour"},
	}
	if len(got) != len(want) {
		t.Fatalf("deliveries are %+v", got)
	}
	for i, d := range got {
		w := want[i]
		if d.ID != w.ID || d.State != w.State || d.Attempt != w.Attempt || w.Hours >= 0 && d.Hours != w.Hours || !strings.Contains(d.Error, w.Error) {
			t.Errorf("delivery is %+v, want %+v", d, w)
		}
	}
	if s := k.Stats(); s.Lost != 0 || s.Handled != 3 || s.Executing != 0 {
		t.Errorf("stats are %+v", s)
	}
}

// An attempt that is over its time counts, also when the database driver is what noticed.
func TestHandlerTimeoutCounts(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: -1, MaxAttempts: 2})
	produced(t, c, "t", numbers(2)...)
	pool := newPool(t, dsn, nil)
	causes := make(chan error, 10)
	k := consume(t, c, "t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
		if m.Value == 2 {
			return nil
		}
		_, err := pool.Exec(ctx, "select pg_sleep(60)")
		causes <- context.Cause(ctx)
		return err
	}), &weir.ConsumerOptions{HandlerTimeout: 100 * time.Millisecond})
	eventually(t, "one is dead", func() bool { return group(t, c, "t", "g").Dead == 1 })
	drained(t, c, "t", "g")
	if err := <-causes; !errors.Is(err, weir.ErrHandlerTimeout) {
		t.Errorf("the handler's context ended with %v, want ErrHandlerTimeout", err)
	}
	dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 10)
	noError(t, err)
	if len(dead) != 1 || dead[0].Attempt != 2 || !strings.Contains(dead[0].Error, "exceeded its time limit") {
		t.Errorf("dead letters are %+v", dead)
	}
	if s := k.Stats(); s.Handled != 1 || s.Failed != 2 || s.Hung != 0 {
		t.Errorf("stats are %+v", s)
	}
}

func TestRunEndsWhenItIsPointless(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	run := func(topic, group string) error {
		k, err := c.NewConsumer(topic, group, handleInto(newTally()), nil)
		noError(t, err)
		return k.Run(t.Context())
	}
	wantError(t, run("missing", "g"), weir.ErrTopicNotFound, "missing")
	wantError(t, run("t", "missing"), weir.ErrGroupNotFound, "missing")
	k, err := c.NewConsumer("t", "g", handleInto(newTally()), nil)
	noError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- k.Run(t.Context()) }()
	ids := produced(t, c, "t", numbers(1)...)
	eventually(t, "it runs", func() bool { return k.Stats().Handled == int64(len(ids)) })
	if err := k.Run(t.Context()); err == nil {
		t.Error("a consumer runs twice at once")
	}
	if dropped, err := c.DropGroup(t.Context(), "t", "g", &weir.DropOptions{Force: true}); err != nil || !dropped {
		t.Fatalf("drop: %v, %v", dropped, err)
	}
	wantError(t, <-ended, weir.ErrGroupNotFound, "g")
}

// counter counts the statements that are sent, by their first comment.
type counter struct {
	mu   sync.Mutex
	sent map[string]int
}

func (n *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sent == nil {
		n.sent = map[string]int{}
	}
	line, _, _ := strings.Cut(data.SQL, "\n")
	n.sent[line]++
	return ctx
}

func (n *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A batch is one flight over the network; its statements count, too.
func (n *counter) TraceBatchStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return n.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: flight})
}

func (n *counter) TraceBatchQuery(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchQueryData) {
	n.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: data.SQL})
}

func (n *counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

const flight = "flight"

func (n *counter) take() map[string]int {
	n.mu.Lock()
	defer n.mu.Unlock()
	sent := n.sent
	n.sent = nil
	return sent
}

// TestClaimAndMessagesInOneFlight: a claim with its messages goes over the network once, an acknowledgement at most once more. Where
// the role may not call weir.claimed, the messages are read by themselves.
func TestClaimAndMessagesInOneFlight(t *testing.T) {
	t.Parallel()
	for _, together := range []bool{true, false} {
		t.Run(fmt.Sprintf("together %v", together), func(t *testing.T) {
			c, dsn := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), nil)
			topicAndGroup(t, c, "t", "g", nil, nil)
			const total = 10_000
			conn := connect(t, dsn)
			execute(t, conn, "create role clerk; grant usage on schema weir to clerk; grant execute on all functions in schema weir to clerk")
			if !together {
				execute(t, conn, "revoke execute on function weir.claimed from clerk")
			}
			var sent counter
			pool := newPool(t, dsn, func(config *pgxpool.Config) {
				config.ConnConfig.Tracer = &sent
				config.ConnConfig.RuntimeParams["role"] = "clerk"
			})
			own := newOn(t, pool, nil)
			_, err := own.Read(t.Context(), "t", 0, 1)
			noError(t, err)
			produced(t, c, "t", numbers(total)...)
			eventually(t, "all are settled", func() bool {
				_, err := c.Read(t.Context(), "t", total-1, 1)
				noError(t, err)
				return value[int64](t, conn, "select settled from weir.topics where topic = 't'") == total
			})
			sent.take()
			k := consume(t, own, "t", "g", handleInto(newTally()), &weir.ConsumerOptions{Prefetch: 1000, PollInterval: time.Minute})
			eventually(t, "all are handled", func() bool { return k.Stats().Handled == total })
			eventually(t, "all are acknowledged", func() bool { return group(t, c, "t", "g").Committed == total })
			counts := sent.take()
			apart, flights := counts["-- The messages of a lease."], counts[flight]
			t.Logf("%v", counts)
			if !together {
				if flights > 1 || apart < total/1000 {
					t.Errorf("without the right: %v", counts)
				}
				return
			}
			all := flights
			for line, n := range counts {
				if strings.HasPrefix(line, "-- ") {
					all += n
				}
			}
			all -= 2 * flights // the two in a flight
			// What finishes while there is no room for another claim takes a poll of its own, one a lease at the most.
			if apart > 0 || flights < total/1000 || all > 2*flights+3 {
				t.Errorf("%d flights over the network: %v", all, counts)
			}
		})
	}
}

// A consumer at rest sends one statement a poll, which reads, writes nothing and takes no transaction id.
func TestIdlePoll(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{
		"shared_preload_libraries": "pg_stat_statements",
		"autovacuum":               "off",
	}})
	c, dsn := openOn(t, server, &weir.Options{NoListen: true, NoMaintenance: true})
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(10)...)
	conn := connect(t, server.DSN("postgres"))
	execute(t, conn, "create extension pg_stat_statements")
	k := consume(t, c, "t", "g", handleInto(newTally()), &weir.ConsumerOptions{PollInterval: 10 * time.Millisecond})
	eventually(t, "all are handled", func() bool { return k.Stats().Handled == 10 })
	drained(t, c, "t", "g")
	own := connect(t, dsn)
	database := value[string](t, own, "select current_database()::text")
	eventually(t, "it has noted that it runs", func() bool { return value[bool](t, own, "select exists (select from weir.consumer)") })

	const statements = `from pg_stat_statements as s join pg_database as d on d.oid = s.dbid where d.datname = $1`
	xids := func() string { return value[string](t, conn, "select pg_snapshot_xmax(pg_current_snapshot())::text") }
	// What was handled last is acknowledged with a claim ahead of its messages, and may be followed by another. It is at rest once
	// polls go out alone.
	execute(t, conn, "select pg_stat_statements_reset()")
	eventually(t, "it is at rest", func() bool {
		return value[int64](t, conn, `
			select coalesce(sum(s.calls) filter (where s.query like '%weir.poll(%'), 0)::bigint
				- coalesce(sum(s.calls) filter (where s.query like '%weir.claimed(%'), 0)::bigint `+statements, database) >= 3
	})
	execute(t, conn, "select pg_stat_statements_reset()")
	before := xids()
	const polls = 50
	eventually(t, "it polls", func() bool {
		return value[int64](t, conn, "select coalesce(sum(calls), 0)::bigint "+statements, database) >= polls
	})
	if after := xids(); after != before {
		t.Errorf("the next transaction id was %s and is %s", before, after)
	}
	type statement struct {
		Query                string
		Calls, Dirtied, Wal  int64
		Rows                 int64
		Hit, Read, Temporary int64
	}
	rows, err := conn.Query(t.Context(), `
		select query, calls, shared_blks_dirtied + shared_blks_written, wal_bytes::bigint, rows, shared_blks_hit, shared_blks_read, temp_blks_written `+statements, database)
	noError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[statement])
	noError(t, err)
	for _, s := range list {
		if !strings.Contains(s.Query, "weir.poll(") || s.Dirtied != 0 || s.Wal != 0 || s.Rows != 0 || s.Temporary != 0 {
			t.Errorf("at rest it sends %+v", s)
		}
		t.Logf("%d calls, %.1f buffers a call", s.Calls, float64(s.Hit+s.Read)/float64(s.Calls))
	}
}

// An idle poll costs little more than the least a statement can cost.
func TestIdlePollCost(t *testing.T) {
	t.Parallel()
	c, dsn := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), &weir.Options{NoListen: true})
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(10)...)
	k := consume(t, c, "t", "g", handleInto(newTally()), nil)
	eventually(t, "all are handled", func() bool { return k.Stats().Handled == 10 })
	drained(t, c, "t", "g")
	k.stop()
	conn := connect(t, dsn)
	one := func() time.Duration {
		began := time.Now()
		_, err := conn.Exec(t.Context(), "select $1::int", 1)
		noError(t, err)
		return time.Since(began)
	}
	poll := func() time.Duration {
		began := time.Now()
		tag, err := conn.Exec(t.Context(), "select state, lease_id, low, high, attempt from weir.poll($1, $2, $3, $4, make_interval(secs => $5), $6, $7, true)",
			"t", "g", "c", 200, 15.0, int64(3<<20), []int64(nil))
		noError(t, err)
		if tag.RowsAffected() != 0 {
			t.Fatal("there was something to do")
		}
		return time.Since(began)
	}
	for range 100 {
		one()
		poll()
	}
	var ones, polls []time.Duration
	for range 2000 {
		ones, polls = append(ones, one()), append(polls, poll())
	}
	slices.Sort(ones)
	slices.Sort(polls)
	ratio := float64(polls[len(polls)/2]) / float64(ones[len(ones)/2])
	t.Logf("idle poll %v, select 1 %v (medians): ratio %.2f", polls[len(polls)/2], ones[len(ones)/2], ratio)
	if ratio > 4 {
		t.Errorf("an idle poll costs %.2f times a select, want at most 4", ratio)
	}
}

// TestFailureThroughCrash: a message whose failure was recorded is kept through a crash of the server, also when its lease, which is older,
// is acknowledged after it.
func TestFailureThroughCrash(t *testing.T) {
	t.Parallel()
	// What need not reach the disk does not, for as long as this takes.
	s := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{"wal_writer_delay": "10s"}})
	c, dsn := openOn(t, s, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{RetryDelay: time.Hour})
	produced(t, c, "t", numbers(3)...)
	began, fail, end := make(chan int64, 3), make(chan struct{}), make(chan struct{})
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		began <- m.ID
		if m.ID == 1 {
			<-fail
			return errors.New("no")
		}
		<-end
		return nil
	}), &weir.ConsumerOptions{Concurrency: 3, Lease: time.Minute})
	for range 3 {
		<-began
	}
	flush := connect(t, dsn)
	execute(t, flush, "create table flushed ()") // and with it the claim, which comes before
	close(fail)
	eventually(t, "the failure is recorded", func() bool { return group(t, c, "t", "g").Retrying == 1 })
	noError(t, s.Crash(t.Context()))
	noError(t, s.StartAgain(t.Context()))
	close(end)
	eventually(t, "the lease is acknowledged", func() bool {
		list, err := c.Groups(t.Context(), "t")
		return err == nil && len(list) == 1 && list[0].Lag == 0 && list[0].Leases == 0
	})
	if g := group(t, c, "t", "g"); g.Retrying != 1 {
		t.Errorf("after the crash the group is %+v: the message that failed is gone", g)
	}
	k.stop()
}
