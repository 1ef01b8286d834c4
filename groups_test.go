package weir_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weirhq/weir"
)

var modes = []weir.Mode{weir.Stream, weir.Ordered, weir.Queue}

// inModes runs a test for a group g of each mode, on a topic t of its own.
func inModes(t *testing.T, o weir.GroupOptions, test func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode)) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			o := o
			o.Mode = mode
			topicAndGroup(t, c, "t", "g", nil, &o)
			test(t, c, dsn, mode)
		})
	}
}

// attempts notes with which attempt numbers each message was handled.
type attempts struct {
	mu   sync.Mutex
	of   map[int][]int
	keys map[string][]int // the values of each key, in the order in which they were handled
}

func newAttempts() *attempts { return &attempts{of: map[int][]int{}, keys: map[string][]int{}} }

func (a *attempts) add(m *weir.Received[int]) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of[m.Value] = append(a.of[m.Value], m.Attempt)
	a.keys[m.Key] = append(a.keys[m.Key], m.Value)
}

// seen are the values that were handled, in order, each as often as it was.
func (a *attempts) seen() []int {
	a.mu.Lock()
	defer a.mu.Unlock()
	var list []int
	for value, of := range a.of {
		for range of {
			list = append(list, value)
		}
	}
	slices.Sort(list)
	return list
}

// A paused group hands out nothing; what a consumer holds it finishes and acknowledges; resumed by another process, it goes on at once.
func TestPauseGroup(t *testing.T) {
	inModes(t, weir.GroupOptions{RetryDelay: -1}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		produced(t, c, "t", numbers(6)...)
		conn := connect(t, dsn)
		var (
			began   = make(chan int, 100)
			release = make(chan struct{})
			done    = newAttempts()
		)
		k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			began <- m.Value
			<-release
			if m.Value == 2 && m.Attempt == 1 {
				return errors.New("not now") // its retry is due at once, and waits for the end of the pause
			}
			done.add(m)
			return nil
		}), &weir.ConsumerOptions{Concurrency: 3, Prefetch: 3, PollInterval: time.Minute})
		held := map[int]bool{<-began: true, <-began: true, <-began: true}
		eventually(t, "it listens", func() bool {
			return value[bool](t, conn, "select exists (select from weir.consumer where backend is not null)")
		})

		other := openDSN(t, dsn, nil)
		if changed, err := other.PauseGroup(t.Context(), "t", "g"); err != nil || !changed {
			t.Fatalf("pause: %v, %v", changed, err)
		}
		if changed, err := other.PauseGroup(t.Context(), "t", "g"); err != nil || changed {
			t.Errorf("pause, again: %v, %v", changed, err)
		}
		if g := group(t, c, "t", "g"); g.PausedAt == nil || g.Leases == 0 {
			t.Errorf("group is %+v, want it paused, with leases out", g)
		}
		if list := claim(t, conn, "t", "g", "another", 10, "1 min"); len(list) > 0 {
			t.Errorf("a paused group gave %v", list)
		}
		produced(t, c, "t", numbers(3)...)
		close(release)
		eventually(t, "what was held is acknowledged", func() bool {
			return group(t, c, "t", "g").Leases == 0 && k.Stats().Buffered == 0
		})
		// The consumer has polled since, to acknowledge, with room for more.
		if got := done.seen(); len(got) > 3 || slices.ContainsFunc(got, func(v int) bool { return !held[v] }) {
			t.Errorf("handled %v, only %v were held", got, held)
		}
		if len(began) > 0 {
			t.Errorf("message %d was handed out by a paused group", <-began)
		}
		if list := claim(t, conn, "t", "g", "another", 10, "1 min"); len(list) > 0 {
			t.Errorf("a paused group gave %v", list)
		}

		if changed, err := other.ResumeGroup(t.Context(), "t", "g"); err != nil || !changed {
			t.Fatalf("resume: %v, %v", changed, err)
		}
		took := within(t, 10*time.Second, "the resumed group is drained", func() bool {
			g := group(t, c, "t", "g")
			return g.Lag == 0 && g.Leases == 0 && g.Waiting == 0 && g.Retrying == 0
		})
		t.Logf("drained %v after the resume, with a poll each minute", took)
		if changed, err := other.ResumeGroup(t.Context(), "t", "g"); err != nil || changed {
			t.Errorf("resume, again: %v, %v", changed, err)
		}
		if got := done.seen(); !slices.Equal(got, []int{1, 1, 2, 2, 3, 3, 4, 5, 6}) {
			t.Errorf("handled are %v", got)
		}
		if g := group(t, c, "t", "g"); g.PausedAt != nil {
			t.Errorf("group is %+v, want it not paused", g)
		}
	})
}

// A lease that expires during a pause waits for its end, and a takeover gives all of it then.
func TestPauseWithDeadConsumer(t *testing.T) {
	inModes(t, weir.GroupOptions{}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		ids := produced(t, c, "t", numbers(5)...)
		conn := connect(t, dsn)
		eventually(t, "there is something to claim", func() bool { return len(claim(t, conn, "t", "g", "dies", 5, "1 hour")) > 0 })
		_, err := c.PauseGroup(t.Context(), "t", "g")
		noError(t, err)
		expire(t, conn)
		execute(t, conn, "update weir.delivery set due_at = clock_timestamp() where state = 'leased'")
		if list := claim(t, conn, "t", "g", "next", 10, "1 hour"); len(list) > 0 {
			t.Errorf("a paused group gave %v", list)
		}
		_, err = c.ResumeGroup(t.Context(), "t", "g")
		noError(t, err)
		y := newTally()
		consume(t, c, "t", "g", handleInto(y), nil)
		drained(t, c, "t", "g")
		if missing := y.missing(ids); len(missing) > 0 {
			t.Errorf("not handled: %v", missing)
		}
	})
}

// The consumer of a group that gets another name ends; what it has handled is not handed out under the new name, what it has not is.
func TestRenameGroup(t *testing.T) {
	inModes(t, weir.GroupOptions{RetryDelay: time.Hour}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		produced(t, c, "t", numbers(10)...)
		noError(t, c.CreateGroup(t.Context(), "t", "taken", nil))
		noError(t, c.CreateTopic(t.Context(), "u", nil))
		noError(t, c.CreateGroup(t.Context(), "u", "h", nil)) // a name on another topic
		for name, want := range map[string]error{"taken": weir.ErrConflict, "": weir.ErrInvalid, " x": weir.ErrInvalid, "a\x00": weir.ErrInvalid} {
			wantError(t, c.RenameGroup(t.Context(), "t", "g", name), want)
		}
		wantError(t, c.RenameGroup(t.Context(), "t", "missing", "x"), weir.ErrGroupNotFound, "missing")
		wantError(t, c.RenameGroup(t.Context(), "missing", "g", "x"), weir.ErrTopicNotFound, "missing")
		noError(t, c.RenameGroup(t.Context(), "t", "g", "g"))

		var (
			began   = make(chan int, 100)
			release = make(chan struct{})
			done    = newAttempts()
		)
		k, err := c.NewConsumer("t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			switch m.Value {
			case 1:
				return weir.Dead(errors.New("never"))
			case 2:
				return errors.New("in an hour")
			case 3:
				began <- m.Value
				<-release
			}
			done.add(m)
			return nil
		}), &weir.ConsumerOptions{Concurrency: 2, Prefetch: 10, PollInterval: 10 * time.Millisecond})
		noError(t, err)
		ended := make(chan error, 1)
		go func() { ended <- k.Run(context.Background()) }()
		<-began
		eventually(t, "one is dead and one is to be tried again", func() bool {
			g := group(t, c, "t", "g")
			return g.Dead == 1 && g.Retrying == 1
		})
		noError(t, c.RenameGroup(t.Context(), "t", "g", "h"))
		produced(t, c, "t", weir.Message{Payload: 11})
		close(release)
		wantError(t, <-ended, weir.ErrGroupNotFound, "'g' does not exist")
		if g := group(t, c, "t", "h"); g.Dead != 1 || g.Retrying != 1 {
			t.Errorf("the renamed group is %+v, want one dead and one to be tried again", g)
		}
		wantError(t, second(c.Group(t.Context(), "t", "g")), weir.ErrGroupNotFound)
		execute(t, connect(t, dsn), "update weir.delivery set due_at = clock_timestamp() where state = 'ready'")
		consume(t, c, "t", "h", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			done.add(m)
			return nil
		}), nil)
		drained(t, c, "t", "h")
		if got := done.seen(); !slices.Equal(got, []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11}) {
			t.Errorf("handled are %v, want 2 to 11 once each", got)
		}
		if got := done.of[2]; !slices.Equal(got, []int{2}) {
			t.Errorf("the one that had failed came in attempts %v", got)
		}
	})
}

// Options are changed one by one, count from then on, and are refused as those of a new group.
func TestAlterGroup(t *testing.T) {
	inModes(t, weir.GroupOptions{MaxAttempts: 3, RetryDelay: time.Hour, RetryMax: 2 * time.Hour}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		ctx := t.Context()
		conn := connect(t, dsn)
		options := func() string {
			return value[string](t, conn, `
				select concat_ws(' ', coalesce(shards, 0), coalesce(key_prefix, '-'), coalesce(header_match::text, '-'), max_attempts, retry_delay, retry_max, split_after)
				from weir.consumer_group where name = 'g'`)
		}
		shards := 0
		if mode == weir.Ordered {
			shards = 16
		}
		check := func(want string, err error) {
			t.Helper()
			noError(t, err)
			if got := options(); got != fmt.Sprint(shards, " ", want) {
				t.Errorf("options are %s, want %d %s", got, shards, want)
			}
		}
		check("- - 3 01:00:00 02:00:00 3", c.AlterGroup(ctx, "t", "g", weir.GroupChange{}))
		check("- - 2 01:00:00 02:00:00 3", c.AlterGroup(ctx, "t", "g", weir.GroupChange{MaxAttempts: 2}))
		check("- - 2 00:00:00 02:00:00 5", c.AlterGroup(ctx, "t", "g", weir.GroupChange{RetryDelay: -1, SplitAfter: 5}))
		check("- - 2 03:00:00 04:00:00 5", c.AlterGroup(ctx, "t", "g", weir.GroupChange{RetryDelay: 3 * time.Hour, RetryMax: 4 * time.Hour}))
		prefix, none := "a", ""
		headers, no := map[string]string{"x": "1"}, map[string]string{}
		wantError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{KeyPrefix: &prefix, MaxAttempts: 9}), weir.ErrInUse, "not paused")
		wantError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{Headers: &headers}), weir.ErrInUse, "not paused")
		noError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{KeyPrefix: &none, Headers: &no})) // as it is
		_, err := c.PauseGroup(ctx, "t", "g")
		noError(t, err)
		check(`a - 2 03:00:00 04:00:00 5`, c.AlterGroup(ctx, "t", "g", weir.GroupChange{KeyPrefix: &prefix}))
		check(`a {"x": "1"} 2 03:00:00 04:00:00 5`, c.AlterGroup(ctx, "t", "g", weir.GroupChange{Headers: &headers}))
		if g := group(t, c, "t", "g"); g.KeyPrefix != "a" || g.Headers["x"] != "1" || g.MaxAttempts != 2 || g.Shards != shards {
			t.Errorf("group is %+v", g)
		}
		check(`- {"x": "1"} 2 03:00:00 04:00:00 5`, c.AlterGroup(ctx, "t", "g", weir.GroupChange{KeyPrefix: &none}))
		check("- - 2 00:00:00 04:00:00 5", c.AlterGroup(ctx, "t", "g", weir.GroupChange{Headers: &no, RetryDelay: -1}))
		_, err = c.ResumeGroup(ctx, "t", "g")
		noError(t, err)

		before := options()
		long := string(make([]byte, 1025))
		for name, change := range map[string]weir.GroupChange{
			"attempts": {MaxAttempts: 1001}, "fewer attempts": {MaxAttempts: -1}, "split": {SplitAfter: -1}, "delay": {RetryDelay: 8 * 24 * time.Hour},
			"max": {RetryMax: 31 * 24 * time.Hour}, "shards": {Shards: 3}, "many shards": {Shards: 512}, "no shards": {Shards: -4}, "prefix": {KeyPrefix: &long},
		} {
			err := c.AlterGroup(ctx, "t", "g", change)
			if !errors.Is(err, weir.ErrInvalid) && (name != "prefix" || !errors.Is(err, weir.ErrFormat)) { // NUL is no text at all
				t.Errorf("%s: error is %v, want ErrInvalid", name, err)
			}
		}
		if mode == weir.Ordered {
			wantError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{Shards: 32, MaxAttempts: 9}), weir.ErrInUse, "not paused")
			noError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{Shards: 16})) // as it is
		} else {
			wantError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{Shards: 16}), weir.ErrInvalid, "only an ordered group")
		}
		wantError(t, c.AlterGroup(ctx, "t", "missing", weir.GroupChange{}), weir.ErrGroupNotFound)
		wantError(t, c.AlterGroup(ctx, "missing", "g", weir.GroupChange{}), weir.ErrTopicNotFound)
		if got := options(); got != before {
			t.Errorf("options are %s after refused changes, were %s", got, before)
		}

		// A running consumer goes by the new number of attempts.
		noError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{MaxAttempts: 1}))
		consume(t, c, "t", "g", weir.Handle(func(context.Context, *weir.Received[int]) error { return errors.New("no") }), nil)
		for i, most := range []int{1, 3} {
			noError(t, c.AlterGroup(ctx, "t", "g", weir.GroupChange{MaxAttempts: most}))
			ids := produced(t, c, "t", numbers(1)...)
			eventually(t, "it is dead", func() bool { return group(t, c, "t", "g").Dead == i+1 })
			d, err := c.DeadLetter(ctx, "t", "g", ids[0])
			noError(t, err)
			if d.Attempt != most || len(d.Errors) != most {
				t.Errorf("dead after %d attempts, want %d", d.Attempt, most)
			}
		}
	})
}

// With a filter a group gets what fits and passes over the rest: it does not lag behind messages that are not its own.
func TestGroupFilter(t *testing.T) {
	prefix := "eu-%"
	inModes(t, weir.GroupOptions{KeyPrefix: prefix, Headers: map[string]string{"kind": "a\"b", "n": "1"}}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		var messages []weir.Message
		var want []int
		for i := range 3000 {
			m := weir.Message{Payload: i, Headers: map[string]string{}}
			switch i % 6 {
			case 0, 1:
				m.Key = fmt.Sprintf("eu-%%%d", i%30)
			case 2:
				m.Key = fmt.Sprintf("eu-%d", i) // the prefix is no pattern
			case 3:
				m.Key = fmt.Sprintf("Eu-%%%d", i)
			}
			if i%3 == 0 {
				m.Headers = map[string]string{"kind": "a\"b", "n": "1", "more": "x"}
			} else if i%3 == 1 {
				m.Headers = map[string]string{"kind": "a\"b", "n": "2"}
			}
			if i%1000 == 999 {
				m.Headers = nil
			}
			if i%6 == 0 {
				want = append(want, i)
			}
			messages = append(messages, m)
		}
		produced(t, c, "t", messages...)
		done := newAttempts()
		consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			if m.Value%100 == 0 && m.Attempt == 1 {
				return weir.RetryAfter(0, errors.New("not now"))
			}
			done.add(m)
			return nil
		}), &weir.ConsumerOptions{Concurrency: 4})
		drained(t, c, "t", "g")
		if got := done.seen(); !slices.Equal(got, want) {
			t.Errorf("%d messages were handled, want %d; the first are %v", len(got), len(want), got[:min(20, len(got))])
		}
		if mode == weir.Ordered {
			for key, values := range done.keys {
				if !slices.IsSorted(values) {
					t.Errorf("key %s was handled in the order %v", key, values)
				}
			}
		}

		// Without one, it gets everything that comes from then on.
		none, no := "", map[string]string{}
		wantError(t, c.AlterGroup(t.Context(), "t", "g", weir.GroupChange{KeyPrefix: &none}), weir.ErrInUse, "not paused")
		_, err := c.PauseGroup(t.Context(), "t", "g")
		noError(t, err)
		noError(t, c.AlterGroup(t.Context(), "t", "g", weir.GroupChange{KeyPrefix: &none, Headers: &no}))
		_, err = c.ResumeGroup(t.Context(), "t", "g")
		noError(t, err)
		ids := produced(t, c, "t", weir.Message{Payload: 5001}, weir.Message{Payload: 5002})
		drained(t, c, "t", "g")
		if got := done.seen(); len(ids) != 2 || !slices.Equal(got, append(want, 5001, 5002)) {
			t.Errorf("%d messages were handled, want %d and two", len(got), len(want))
		}
	})
}

// A filter that fits one message of 100,000: each poll moves the cursor on, by a bounded number of messages and at a bounded cost.
func TestRareFilter(t *testing.T) {
	const all, every, most = 300_000, 100_000, 200_000
	inModes(t, weir.GroupOptions{KeyPrefix: "rare"}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		conn := connect(t, dsn)
		execute(t, conn, "select weir.make_room('t', 300000)")
		execute(t, conn, `
			insert into weir.log_1 (key, payload)
			select case when i % 100000 = 70000 then 'rare' else 'r' || i end, to_json(i) from generate_series(1, 300000) as i`)
		execute(t, conn, "analyze weir.log_1")
		pages := value[int](t, conn, "select (pg_relation_size('weir.log_1_1') / 8192)::int")
		noError(t, c.CreateGroup(t.Context(), "t", "settler", nil))
		settledAt(t, c, "t", "settler")

		var (
			position int64
			polls    int
			got      []int64
		)
		for position < all {
			polls++
			var plan string
			noError(t, conn.QueryRow(t.Context(), "explain (analyze, buffers, timing off, format json) select * from weir.claim('t', 'g', 'a', 100)").Scan(&plan))
			var parsed []struct {
				Plan struct {
					Hit  int `json:"Shared Hit Blocks"`
					Read int `json:"Shared Read Blocks"`
				}
				Time float64 `json:"Execution Time"`
			}
			noError(t, json.Unmarshal([]byte(plan), &parsed))
			now := value[int64](t, conn, "select c.claimed from weir.cursor as c join weir.consumer_group as g on g.id = c.group_id where g.name = 'g'")
			// Each of the messages that it passes is read twice, once through the index.
			read := parsed[0].Plan.Hit + parsed[0].Plan.Read
			t.Logf("poll %d: %d to %d, %.1f ms, %d pages of %d", polls, position, now, parsed[0].Time, read, pages)
			if now <= position || now > position+3*most || read > 5*pages*most/all+2000 {
				t.Errorf("poll %d moved the cursor from %d to %d and read %d pages, the log has %d", polls, position, now, read, pages)
			}
			if now <= position {
				break
			}
			position = now
			got = append(got, column[int64](t, conn, `
				select f.id from (select lease_id from weir.leases where grp = 'g' and consumer = 'a'
					union all select lease_id from weir.deliveries where grp = 'g' and consumer = 'a') as l
				cross join lateral weir.fetch(l.lease_id) as f order by 1`)...)
			execute(t, conn, `
				select count(*) from weir.ack_many(array(
					select lease_id from weir.leases where grp = 'g' union all select lease_id from weir.deliveries where grp = 'g' and lease_id is not null), 'a')`)
			if polls > 50 {
				t.Fatal("it does not come to an end")
			}
		}
		if polls < all/most/3+1 {
			t.Errorf("%d polls passed all of it, want none to pass too much", polls)
		}
		y := newTally()
		y.add(got...)
		consume(t, c, "t", "g", handleInto(y), nil)
		drained(t, c, "t", "g")
		if y.distinct() != all/every || y.calls() != all/every {
			t.Errorf("%d messages in %d calls, want %d", y.distinct(), y.calls(), all/every)
		}
		// From the beginning again, by the consumer alone.
		_, err := c.Seek(t.Context(), "t", "g", weir.Beginning())
		noError(t, err)
		eventually(t, "they come again", func() bool { return y.calls() == 2*all/every })
		drained(t, c, "t", "g")
	})
}

// A group is moved while handlers run: their acknowledgements are refused, what lies above the position comes again from the log with
// attempts counted anew, retries below it stay, dead letters too.
func TestSeekWhileHandlersRun(t *testing.T) {
	inModes(t, weir.GroupOptions{RetryDelay: time.Hour}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		ids := produced(t, c, "t", numbers(10)...)
		conn := connect(t, dsn)
		var (
			first   = newAttempts()
			again   = newAttempts()
			began   = make(chan int, 10)
			release = make(chan struct{})
			moved   = make(chan struct{})
			result  = make(chan error, 10)
		)
		isMoved := func() bool {
			select {
			case <-moved:
				return true
			default:
				return false
			}
		}
		k := consume(t, c, "t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
			if isMoved() {
				again.add(m)
				return nil
			}
			switch m.Value {
			case 2, 8:
				return errors.New("in an hour")
			case 1, 9:
				return weir.Dead(errors.New("never"))
			case 5, 7:
				began <- m.Value
				<-release
				result <- ctx.Err()
				return nil
			}
			first.add(m)
			return nil
		}), &weir.ConsumerOptions{Concurrency: 10, PollInterval: 20 * time.Millisecond})
		<-began
		<-began
		eventually(t, "the others are through", func() bool {
			g := group(t, c, "t", "g")
			// A queue's acknowledgements too: a message of its own below the position comes again while its own is not recorded.
			leased := value[int](t, conn, "select count(*) from weir.delivery where state = 'leased'")
			return len(first.seen()) == 4 && g.Retrying == 2 && g.Dead == 2 && k.Stats().Buffered == 2 && (mode != weir.Queue || leased == 2)
		})
		if was, err := c.Seek(t.Context(), "t", "g", weir.AtID(ids[5])); err != nil || was != ids[9] {
			t.Errorf("seek gave %d, %v; want %d", was, err, ids[9])
		}
		close(moved)
		close(release)
		want := []int{6, 7, 8, 9, 10}
		if mode == weir.Queue {
			want = []int{5, 6, 7, 8, 9, 10} // a message of its own, below the position, that has not been handled
		}
		eventually(t, "what lies above comes again", func() bool { return slices.Equal(again.seen(), want) })
		eventually(t, "nothing is held", func() bool { return group(t, c, "t", "g").Leases == 0 && k.Stats().Buffered == 0 })
		for range 2 {
			<-result
		}
		if k.Stats().Lost == 0 {
			t.Error("the acknowledgement of what ran was taken")
		}
		again.mu.Lock()
		for v, a := range again.of {
			if !slices.Equal(a, []int{1}) {
				t.Errorf("message %d came again in attempts %v, want 1", v, a)
			}
		}
		again.mu.Unlock()
		rows := column[string](t, conn, "select concat_ws(' ', message_id, state, attempt) from weir.delivery order by message_id")
		stay := []string{"1 dead 1", "2 ready 1", "9 dead 1"}
		if mode == weir.Queue {
			stay = stay[:2] // its dead letters above the position begin another life, as the rest
		}
		if !slices.Equal(rows, stay) {
			t.Errorf("deliveries are %q, want %q", rows, stay)
		}
		if g := group(t, c, "t", "g"); g.Committed != ids[9] {
			t.Errorf("group is %+v, want all committed", g)
		}
		execute(t, conn, "update weir.delivery set due_at = clock_timestamp() where state = 'ready'")
		c.Wake("t")
		eventually(t, "the retry below comes too", func() bool { return slices.Equal(again.seen(), append([]int{2}, want...)) })
	})
}

// The shards of a paused group are changed, with retries, parked messages, dead letters and shared-out ranges pending: nothing is lost,
// nothing comes twice, each key keeps its order.
func TestShardsChange(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	other := openDSN(t, dsn, nil)
	conn := connect(t, dsn)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered, Shards: 4, RetryDelay: 20 * time.Millisecond, RetryMax: 50 * time.Millisecond})
	const keys, each = 60, 50
	messages := keyed(keys, each)
	for i := range 200 { // without a key: no order
		messages = append(messages, weir.Message{Payload: 1_000_000 + i})
	}
	produced(t, c, "t", messages...)
	var (
		done  = newAttempts()
		busy  sync.Map
		gates = make(chan chan struct{}, 10)
		count int
		mu    sync.Mutex
	)
	// After so many messages handlers stop until the test lets them go on.
	stops := []int{300, 900, 1500, 2100}
	handler := weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if m.Key != "" {
			if _, twice := busy.LoadOrStore(m.Key, true); twice {
				t.Errorf("two of key %s at once", m.Key)
			}
			defer busy.Delete(m.Key)
		}
		mu.Lock()
		count++
		stop := len(stops) > 0 && count == stops[0]
		if stop {
			stops = stops[1:]
		}
		mu.Unlock()
		if stop {
			gate := make(chan struct{})
			gates <- gate
			<-gate
		}
		switch {
		case m.Key == "k7" && m.Value == 10:
			if m.Attempt == 1 {
				return weir.Dead(errors.New("redriven later"))
			}
		case m.Value < 1_000_000 && m.Value%10 == 3 && m.Attempt <= 2:
			return errors.New("not now")
		}
		done.add(m)
		return nil
	})
	o := &weir.ConsumerOptions{Concurrency: 4, Prefetch: 40, PollInterval: 20 * time.Millisecond}
	consume(t, c, "t", "g", handler, o)
	consume(t, other, "t", "g", handler, o)
	pending := 0
	for _, shards := range []int{32, 1, 256, 8} {
		gate := <-gates
		_, err := c.PauseGroup(t.Context(), "t", "g")
		noError(t, err)
		if err := c.AlterGroup(t.Context(), "t", "g", weir.GroupChange{Shards: shards}); !errors.Is(err, weir.ErrInUse) {
			t.Errorf("shards were changed with a lease out: %v", err)
		}
		close(gate)
		eventually(t, "nothing is held", func() bool { return group(t, c, "t", "g").Leases == 0 })
		pending += value[int](t, conn, "select (select coalesce(sum(cardinality(ids)), 0) from weir.shard_range) + (select count(*) from weir.delivery where state <> 'dead')")
		noError(t, c.AlterGroup(t.Context(), "t", "g", weir.GroupChange{Shards: shards}))
		results, err := c.Check(t.Context())
		noError(t, err)
		for _, r := range results {
			if len(r.Violations) > 0 {
				t.Errorf("with %d shards: %s: %v", shards, r.Name, r.Violations)
			}
		}
		_, err = c.ResumeGroup(t.Context(), "t", "g")
		noError(t, err)
	}
	drained(t, c, "t", "g")
	if pending == 0 {
		t.Error("nothing was pending at any change")
	}
	t.Logf("%d messages were pending at the changes", pending)
	for k := range keys {
		key := fmt.Sprintf("k%d", k)
		var want []int
		for n := range each {
			if k != 7 || n != 10 {
				want = append(want, n)
			}
		}
		if got := done.keys[key]; !slices.Equal(got, want) {
			t.Errorf("key %s was handled as %v", key, got)
		}
	}
	if got := len(done.keys[""]); got != 200 {
		t.Errorf("%d messages without a key were handled, want 200", got)
	}
	// The dead letter has moved to its key's shard as well.
	shard := value[int](t, conn, "select (hashtextextended('k7' collate \"C\", 0) & 7)::int")
	if got := value[int](t, conn, "select shard from weir.delivery where state = 'dead'"); got != shard {
		t.Errorf("the dead letter is in shard %d, its key in %d", got, shard)
	}
}

// A claim that has read the group before its shards are changed, and shares out a range after that, shares it out by the new shards.
func TestShardsChangeDuringClaim(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered, Shards: 4})
	produced(t, c, "t", keyed(50, 4)...)
	noError(t, c.CreateGroup(t.Context(), "t", "settler", nil))
	settledAt(t, c, "t", "settler")
	produced(t, c, "t", numbers(1)...) // or nobody would look at the head
	lock, claims, watch := connect(t, dsn), connect(t, dsn), connect(t, dsn)
	tx := start(t, lock)
	execute(t, tx, "lock table weir.log_1_1 in access exclusive mode") // the claim reads the head there
	done := make(chan error, 1)
	go func() {
		done <- second(claims.Exec(context.Background(), "select * from weir.claim('t', 'g', 'a', 200)"))
	}()
	eventually(t, "the claim waits", func() bool {
		return value[bool](t, watch, "select cardinality(pg_blocking_pids($1)) > 0", claims.PgConn().PID())
	})
	_, err := c.PauseGroup(t.Context(), "t", "g")
	noError(t, err)
	noError(t, c.AlterGroup(t.Context(), "t", "g", weir.GroupChange{Shards: 16}))
	noError(t, tx.Commit(t.Context()))
	noError(t, <-done)
	_, err = c.ResumeGroup(t.Context(), "t", "g")
	noError(t, err)
	execute(t, watch, "select * from weir.claim('t', 'g', 'b', 200)")
	var all, wrong int
	noError(t, watch.QueryRow(t.Context(), `
		select count(*), count(*) filter (where p.shard <> (hashtextextended(l.key collate "C", 0) & 15)::int)
		from (select shard, ids from weir.lease union all select shard, ids from weir.shard_range) as p
		cross join lateral unnest(p.ids) as i (id)
		join weir.log_1 as l on l.id = i.id
		where l.key is not null`).Scan(&all, &wrong))
	if all != 200 || wrong != 0 {
		t.Errorf("of %d messages %d are in the shard of other keys, and can be overtaken by those of their own; want none of 200", all, wrong)
	}
}

// A poll that acknowledges tells as well that messages wait for the fence; else its consumer would sleep for a whole PollInterval.
func TestAcknowledgingPollTellsWhatWaits(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn, open := connect(t, dsn), connect(t, dsn)
	produced(t, c, "t", numbers(1)...)
	lease := claimOne(t, conn, "t", "g", "a", 10, "1 min")
	tx := start(t, open)
	execute(t, tx, "select weir.produce('t', '2')")
	produced(t, c, "t", numbers(1)...)
	for _, acks := range []any{nil, []int64{lease.ID}, nil} {
		states := column[string](t, conn, "select state from weir.poll('t', 'g', 'a', 10, '1 min', 1000000, $1::bigint[], true)", acks)
		if !slices.Contains(states, "waiting") {
			t.Errorf("with the acknowledgements %v the poll tells %q, want that messages wait", acks, states)
		}
	}
}

// What a consumer that stops has handled is not handed out again, in a queue group too.
func TestReleaseOfHandled(t *testing.T) {
	inModes(t, weir.GroupOptions{}, func(t *testing.T, c *weir.Client, dsn string, mode weir.Mode) {
		produced(t, c, "t", numbers(1)...)
		conn := connect(t, dsn)
		lease := claimOne(t, conn, "t", "g", "a", 10, "1 min")
		if !value[bool](t, conn, "select weir.release($1, 'a', array[1])", lease.ID) {
			t.Fatal("the release was refused")
		}
		for _, l := range claim(t, conn, "t", "g", "b", 10, "1 min") {
			if ids := column[int64](t, conn, "select id from weir.fetch($1)", l.ID); len(ids) > 0 {
				t.Errorf("%v were handed out again", ids)
			}
		}
	})
}
