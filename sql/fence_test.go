package sql_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// scenarios are the interleavings that attack the fence, the claims and the leases. Each is played on the schema as it is,
// where it must find nothing (TestFence), and on the breakages of testdata/bugs.txt, where it must find something
// (TestBugs).
var scenarios = map[string]func(b *bench, m mode){
	"RawHead":           rawHead,
	"SnapshotXmax":      snapshotXmax,
	"OldObserver":       oldObserver,
	"AckFirst":          ackFirst,
	"IDBeforeXid":       idBeforeXid,
	"IDInSegment":       idInSegment,
	"SequenceCache":     sequenceCache,
	"SequenceSetBack":   sequenceSetBack,
	"TornHead":          tornHead,
	"LookOpen":          lookOpen,
	"LookPrepared":      lookPrepared,
	"LookSavepoint":     lookSavepoint,
	"LookAfterHead":     lookAfterHead,
	"LookRepeatable":    lookRepeatable,
	"LookInTransaction": lookInTransaction,
	"KeptPair":          keptPair,
	"UnrelatedOpen":     unrelatedOpen,
	"FenceNotWaitedFor": fenceNotWaitedFor,
	"SettledKept":       settledKept,
	"PairReplaced":      pairReplaced,
	"ForeignPair":       foreignPair,
	"Burned":            burned,
	"Gap":               gap,
	"IdleNoXid":         idleNoXid,
	"RacingClaims":      racingClaims,
	"StaleHolder":       staleHolder,
	"LateAck":           lateAck,
	"ForeignAck":        foreignAck,
	"PeerHasLease":      peerHasLease,
	"DoneKept":          doneKept,
	"FailedOnce":        failedOnce,
	"Poison":            poison,
	"FetchInClaim":      fetchInClaim,
	"LateLease":         lateLease,
	"CaseOne":           caseOne,
}

var modes = []mode{own, plain}

func TestFence(t *testing.T) {
	l := newLab(t)
	names := make([]string, 0, len(scenarios))
	for name := range scenarios {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for _, m := range modes {
			t.Run(name+"/"+m.String(), func(t *testing.T) {
				if err := l.play(func(b *bench) { scenarios[name](b, m) }, nil); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestBugs breaks the SQL in each way of testdata/bugs.txt and demands that the scenarios named there find it.
func TestBugs(t *testing.T) {
	l := newLab(t)
	bugs := readBugs(t)
	if len(bugs) < 15 {
		t.Fatalf("the catalogue has %d bugs, it is to have at least 15", len(bugs))
	}
	found := 0
	for _, g := range bugs {
		t.Run(g.Name, func(t *testing.T) {
			if len(g.FoundBy) == 0 {
				t.Fatal("no scenario is named that finds it")
			}
			for _, d := range g.FoundBy {
				scenario := scenarios[d]
				if scenario == nil {
					t.Fatalf("there is no scenario %s", d)
				}
				began := time.Now()
				var caught error
				for _, m := range modes {
					if err := l.play(func(b *bench) { scenario(b, m) }, g.apply); err != nil {
						caught = fmt.Errorf("%v: %w", m, err)
						break
					}
				}
				if caught == nil {
					t.Errorf("%s did not find it", d)
					continue
				}
				t.Logf("%s found it in %v: %v", d, time.Since(began).Round(time.Millisecond), caught)
			}
			if !t.Failed() {
				found++
			}
		})
	}
	t.Logf("%d of %d seeded bugs found", found, len(bugs))
}

// TestBugsAreListed keeps the list in docs/guarantees.md and the catalogue the same.
func TestBugsAreListed(t *testing.T) {
	page, err := os.ReadFile("../docs/guarantees.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range readBugs(t) {
		row := "| `" + g.Name + "` | " + g.Why + " | `TestFence/" + strings.Join(g.FoundBy, "`, `TestFence/") + "` |"
		if !strings.Contains(string(page), row+"\n") {
			t.Errorf("docs/guarantees.md lacks the row\n%s", row)
		}
	}
}

// rawHead: an id above one that is still open must not be passed.
func rawHead(b *bench, m mode) {
	a, c := b.session("a"), b.session("c")
	a.do("begin")
	a.produce()
	b.session("b").produce()
	c.take(m)
	a.do("commit")
	b.drain(m)
}

// snapshotXmax: the latest completed xid + 1 bounds nothing. A has the lower xid and the higher id.
func snapshotXmax(b *bench, m mode) {
	a, p, c := b.session("a"), b.session("p"), b.session("c")
	a.do("begin")
	a.do("select pg_current_xact_id()")
	p.do("begin")
	p.produce()
	// Not by weir.produce, whose savepoint near a segment's end takes an xid of its own: then the latest completed one is no longer
	// below p's.
	a.do("insert into weir.log_1 (payload) values ('1')")
	a.do("commit")
	c.take(m)
	c.take(m)
	p.do("commit")
	b.drain(m)
}

// oldObserver: a transaction that wrote something before it reads the head has an xid that bounds nothing.
func oldObserver(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	c.do("begin")
	c.do("select pg_current_xact_id()")
	p.do("begin")
	p.produce()
	b.session("q").produce()
	c.take(plain)
	c.take(plain)
	c.do("commit")
	c.take(m)
	p.do("commit")
	b.drain(m)
}

// ackFirst: an acknowledgement in the same call must not give the transaction its xid before the head is read.
func ackFirst(b *bench, m mode) {
	p, c, l := b.session("p"), b.session("c"), b.session("l")
	p.produce()
	lease := *c.poll(m, 100)[0].ID
	c.fetch(lease)
	l.do("begin")
	l.do("select from weir.lease for update")
	polled := c.beginFunc("poll", func() error {
		rows, err := c.tryPoll(m, 100, lease)
		for _, r := range rows {
			if err == nil && r.ID != nil && r.State != "lost" {
				c.fetch(*r.ID)
			}
		}
		return err
	})
	polled.mustBlock()
	p.do("begin")
	p.produce()
	b.session("q").produce()
	l.do("rollback")
	polled.end()
	p.do("commit")
	b.drain(m)
}

// idBeforeXid: a producer that has drawn its id and does nothing else yet must already be visible to the fence.
func idBeforeXid(b *bench, m mode) { drawnEarly(b, m, "weir.log_1") }

// idInSegment: the same for a row that is written straight into a segment.
func idInSegment(b *bench, m mode) { drawnEarly(b, m, "weir.log_1_1") }

func drawnEarly(b *bench, m mode, table string) {
	p, l, c := b.session("p"), b.session("l"), b.session("c")
	p.produce() // the first nextval() of about 32 takes an xid by itself: to write its WAL record
	c.take(m)
	l.do(`create function public.slow() returns json language plpgsql as
		'begin perform pg_advisory_xact_lock(42); return ''1''; end'`)
	l.do("select pg_advisory_lock(42)")
	inserted := p.begin("insert into " + table + " (payload) values (public.slow())")
	inserted.mustBlock()
	b.session("q").produce()
	c.take(m)
	c.take(m)
	l.do("select pg_advisory_unlock(42)")
	inserted.end()
	b.drain(m)
}

// code is the SQLSTATE of an error of the server.
func code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// sequenceCache: a sequence that hands out ids out of order is refused, loudly, and works again once it is repaired.
func sequenceCache(b *bench, m mode) {
	one, two, c := b.session("one"), b.session("two"), b.session("c")
	c.do("alter sequence weir.log_1_id cache 10")
	one.produce()
	two.produce()
	_, err := c.tryPoll(m, 100)
	if err == nil {
		c.take(m)
		one.produce()
		b.drain(m)
		b.failf("a sequence with CACHE 10 was not refused")
	}
	if code(err) != "WE008" {
		b.failf("a sequence with CACHE 10: %w", err)
	}
	c.do("alter sequence weir.log_1_id increment 1 cache 1 no cycle")
	one.close()
	two.close()
	b.session("three").produce()
	b.drain(m)
}

// sequenceSetBack: a sequence below the settled head is refused by consumers and producers, and the hint repairs it.
func sequenceSetBack(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	for range 5 {
		p.produce()
	}
	c.take(m)
	c.do("select setval('weir.log_1_id', 2)")
	_, err := c.tryPoll(m, 100)
	if code(err) != "WE007" {
		b.failf("poll with a sequence set back: got %v, want WE007", err)
	}
	var pg *pgconn.PgError
	errors.As(err, &pg)
	c.do("delete from weir.log_1 where id > 2") // or the next produce would fail for another reason
	if err := p.try("select weir.produce('t', '1')"); code(err) != "WE007" {
		b.failf("produce with a sequence set back: got %v, want WE007", err)
	}
	c.do(pg.Hint[len("Run: "):])
	clear(b.got)
	b.got[1], b.got[2] = 1, 1
	p.produce()
	b.drain(m)
}

// tornHead: last_value, read without its buffer's lock, can be up to 32 too high for a moment. The moment is made to last
// here; a caller whose head is exact has no such moment.
func tornHead(b *bench, m mode) {
	if m == own {
		return
	}
	p, c := b.session("p"), b.session("c")
	p.produce()
	c.do("select setval('weir.log_1_id', 32)")
	c.take(m)
	c.do("select setval('weir.log_1_id', 1)")
	p.produce()
	p.produce()
	b.drain(m)
}

// second polls until the fence has looked for the producers at work, and then some more.
func second(b *bench, c *session, m mode) {
	b.until("the producers at work were looked for", func() bool {
		return len(c.take(m)) > 0 || value[bool](b.sessions[0], "select bool_or(looked) from weir.fence_rows")
	})
	for range 3 {
		c.take(m)
	}
}

// lookOpen: the proof by lock sees a producer that is at work.
func lookOpen(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	p.do("begin")
	p.produce()
	b.session("q").produce()
	second(b, c, m)
	p.do("commit")
	b.drain(m)
}

// lookPrepared: it sees one that is prepared, and holds on to one that is prepared after it was seen.
func lookPrepared(b *bench, m mode) {
	u, p, q, c := b.session("u"), b.session("p"), b.session("q"), b.session("c")
	p.do("begin")
	p.produce()
	p.do(fmt.Sprintf("prepare transaction '%s-one'", b.database))
	b.session("r").produce()
	second(b, c, m)
	p.do(fmt.Sprintf("commit prepared '%s-one'", b.database))

	u.do("begin")
	u.do("select pg_current_xact_id()")
	q.do("begin")
	q.produce()
	b.session("r").produce()
	second(b, c, m)
	q.do(fmt.Sprintf("prepare transaction '%s-two'", b.database))
	for range 3 {
		c.take(m)
	}
	q.do(fmt.Sprintf("commit prepared '%s-two'", b.database))
	u.do("rollback")
	b.drain(m)
}

// lookSavepoint: it names the transaction, not one of its savepoints; also after a rollback to it.
func lookSavepoint(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	p.do("begin")
	p.do("savepoint a")
	p.produce()
	p.do("rollback to a")
	p.do("savepoint b")
	p.produce()
	b.session("q").produce()
	second(b, c, m)
	p.do("commit")
	b.drain(m)
}

// lookAfterHead: the head is read before the look, or a producer that begins between them is not seen.
func lookAfterHead(b *bench, m mode) {
	u, c, l := b.session("u"), b.session("c"), b.session("l")
	u.do("begin")
	u.do("select pg_current_xact_id()")
	b.session("q").do("insert into weir.log_1 (payload) values ('1')")
	c.take(m)
	b.until("the pair is old enough", func() bool {
		return value[bool](b.sessions[0], "select max(clock_timestamp() - observed_at) > interval '100 ms' from weir.fence where head > settled")
	})
	l.do("begin")
	l.do("lock table weir.segment in access exclusive mode")
	polled := c.beginFunc("poll", func() error { _, err := c.tryPoll(m, 0); return err })
	polled.mustBlock()
	p := b.session("p")
	p.do("begin")
	p.do("insert into weir.log_1 (payload) values ('1')")
	b.session("r").do("insert into weir.log_1 (payload) values ('1')")
	l.do("rollback")
	polled.end()
	for range 3 {
		c.take(m)
	}
	p.do("commit")
	u.do("commit")
	b.drain(m)
}

// lookRepeatable: where all statements share a snapshot, a look proves nothing for the ones that follow.
func lookRepeatable(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	p.do("begin")
	p.produce()
	b.session("q").produce()
	c.do("begin isolation level repeatable read")
	c.do("select pg_current_xact_id()")
	p.do("commit")
	c.take(plain)
	c.do("commit")
	b.drain(m)
}

// lookInTransaction: a look in a transaction that stays open takes nothing from what others see proven meanwhile.
func lookInTransaction(b *bench, m mode) {
	p, c, d := b.session("p"), b.session("c"), b.session("d")
	p.do("begin")
	p.produce()
	c.take(m)
	b.session("q").produce()
	c.take(m)
	b.until("the pair is old enough", func() bool {
		return value[bool](b.sessions[0], "select bool_or(pending is not null and overdue) or max(bound) > 0 from weir.fence_rows")
	})
	r := b.session("r")
	r.do("begin")
	r.produce()
	b.session("q").produce()
	d.do("begin")
	d.take(plain)
	p.do("commit")
	before := b.settled()
	d.do("commit")
	if after := b.settled(); after < before {
		b.failf("fall: the settled head went from %d to %d", before, after)
	}
	r.do("commit")
	b.drain(m)
}

// keptPair: with a producer always in flight, each message is handed out soon after it can be.
func keptPair(b *bench, m mode) {
	c := b.session("c")
	before := b.session("p0")
	before.do("begin")
	before.produce()
	const rounds = 12
	for i := range rounds {
		next := b.session(fmt.Sprintf("p%d", i+1))
		next.do("begin")
		next.produce()
		c.take(m)
		before.do("commit")
		c.take(m)
		before = next
	}
	if len(b.got) < rounds-3 {
		b.failf("stalled: %d of %d committed messages were handed out while producers overlap", len(b.got), rounds)
	}
	before.do("commit")
	b.drain(m)
}

// unrelatedOpen: a transaction that does not produce to the topic, whatever it does, holds nothing up for long.
func unrelatedOpen(b *bench, m mode) {
	c, p := b.session("c"), b.session("p")
	c.do("select weir.create_topic('other')")
	c.do("create table public.other (n int)")
	for i, u := range []struct {
		what, database string
		steps          []string
	}{
		{"wrote to a table", b.database, []string{"begin", "insert into public.other values (1)"}},
		{"writes in another database", "postgres", []string{"begin", "select pg_current_xact_id()"}},
		{"produced to another topic", b.database, []string{"begin", "select weir.produce('other', '1')"}},
		{"holds a snapshot", b.database, []string{"begin isolation level repeatable read", "select pg_current_xact_id()", "select from weir.log_1"}},
		{"claimed in its transaction", b.database, []string{"select weir.create_group('t', 'late')", "begin", "select weir.claim('t', 'late', 'x')"}},
		{"is prepared", b.database, []string{"begin", "insert into public.other values (1)", "prepare transaction '" + b.database + "'"}},
	} {
		s := b.sessionOf("u", u.database)
		for _, step := range u.steps {
			s.do(step)
		}
		for range 3 { // and goes on holding nothing up
			p.produce()
			b.until("a message is there in spite of one that "+u.what, func() bool { return len(c.take(m)) > 0 })
		}
		p.produce()
		began := time.Now()
		for len(b.got) < 4*(i+1) {
			if waited := time.Since(began); waited > 3*time.Second {
				b.failf("stalled: a message waits for %v for a transaction that %s", waited, u.what)
			}
			c.take(m)
		}
		if n := value[int](c, "select count(*)::int from weir.fence where topic_id = 1"); n > 4 {
			b.failf("the fence has grown to %d rows", n)
		}
		if u.what == "is prepared" {
			s.do("rollback prepared '" + b.database + "'")
		} else {
			s.do("rollback")
		}
	}
	b.drain(m)
}

// fenceNotWaitedFor: a claim in a long transaction does not make another group wait.
func fenceNotWaitedFor(b *bench, m mode) {
	c, d := b.session("c"), b.session("d")
	c.do("select weir.create_group('t', 'other')")
	b.session("p").produce()
	c.do("begin")
	c.take(plain)
	b.session("q").produce()
	claimed := d.begin("select weir.claim('t', 'other', 'd')")
	if claimed.blocked() {
		b.failf("stalled: another group waits for a claim in an open transaction")
	}
	claimed.end()
	b.until("the other group has the messages", func() bool {
		d.do("select weir.claim('t', 'other', 'd')")
		return value[int64](d, "select claimed from weir.groups where grp = 'other'") == 2
	})
	c.do("commit")
	b.drain(m)
}

// settledKept: the settled head does not go down while a new pair waits.
func settledKept(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	highest := int64(0)
	look := func() {
		now := b.settled()
		if now < highest {
			b.failf("fall: the settled head went from %d to %d", highest, now)
		}
		highest = now
	}
	for range 3 {
		b.session("q").produce()
		c.take(m)
		look()
		p.do("begin")
		p.produce()
		b.session("q").produce()
		c.take(m)
		look()
		c.take(m)
		look()
		p.do("commit")
	}
	b.drain(m)
	look()
}

// pairReplaced: P finds a proven pair, and is held up before it locks the row. Meanwhile another puts a new pair there, which waits for its
// proof. P must not write over that: others see it proven while P's transaction is open, and would see it gone after.
func pairReplaced(b *bench, m mode) {
	admin, p := b.session("admin"), b.session("p")
	// The condition is judged before the row is locked: the only place within that statement where one can be made to wait.
	const condition = "(r.pending is null or r.pending <= proven)"
	text := value[string](admin, "select pg_get_functiondef('weir.settle'::regproc)")
	if strings.Count(text, condition) != 1 {
		b.failf("weir.settle has not once %s", condition)
	}
	admin.do(`create function public.held_up() returns boolean language plpgsql as $$
		begin
			if current_setting('lab.held_up', true) = 'on' then
				perform pg_advisory_xact_lock(4711);
			end if;
			return true;
		end $$`)
	admin.do(strings.Replace(text, condition, condition+" and public.held_up()", 1))

	b.session("q").produce()
	b.session("c").take(m)
	b.session("c").poll(m, 0)
	p.do("begin")
	p.produce()
	last := b.session("q").produce()
	admin.do("begin")
	admin.do("select pg_advisory_xact_lock(4711)")
	late := b.session("late")
	late.do("set lab.held_up = 'on'")
	late.do("begin")
	polled := late.beginFunc("poll", func() error { _, err := late.tryPoll(m, 0); return err })
	polled.mustBlock()
	b.session("c").poll(m, 0) // puts (last, its xid) into the row
	other := b.session("other")
	other.do("begin")
	other.produce() // keeps what has a later xid from its proof
	admin.do("commit")
	polled.end()
	p.do("commit")
	b.until("the new pair is proven", func() bool { return b.settled() >= last })
	late.do("commit")
	if now := b.settled(); now < last {
		b.failf("fall: the settled head went from %d to %d", last, now)
	}
	other.do("commit")
	b.drain(m)
}

// foreignPair: a pair of another cluster, whose xids mean nothing here, is neither believed nor waited for.
func foreignPair(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	p.produce()
	c.take(m)
	c.do("update weir.fence set head = 400, xid = '9000000000000000', holders = '{9000000000000000}', boot = now() - interval '1 day'")
	p.do("begin")
	p.produce()
	b.session("q").produce()
	// Where there is no proof by lock to help out.
	c.do("set default_transaction_isolation = 'repeatable read'")
	c.take(m)
	p.do("commit")
	for turn := 0; len(b.got) < 3; turn++ {
		if turn == 20 {
			b.failf("stalled: %d of 3 messages after 20 polls", len(b.got))
		}
		c.take(m)
	}
	b.drain(m)
}

// burned: ids of transactions that rolled back, or whose backend was killed, hold nothing up: one poll passes them.
func burned(b *bench, m mode) {
	p, k, c := b.session("p"), b.session("k"), b.session("c")
	p.do("begin")
	p.produce()
	p.do("rollback")
	k.do("begin")
	k.produce()
	p.do("select pg_terminate_backend($1, 5000)", int64(k.pid))
	if got := c.take(m); len(got) > 0 {
		b.failf("phantom: %v was handed out", got)
	}
	id := p.produce()
	if got := c.take(m); len(got) != 1 || got[0] != id {
		b.failf("one poll after burned ids gave %v, not message %d", got, id)
	}
	b.drain(m)
}

// gap: a gap of many segments costs a claim or two.
func gap(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	p.produce()
	c.take(m)
	p.do("select weir.make_room('t', 20000)")
	p.do("select setval('weir.log_1_id', 15500)")
	id := p.produce()
	for turn := 1; ; turn++ {
		if got := c.take(m); len(got) == 1 && got[0] == id {
			break
		}
		if turn == 2 {
			b.failf("a gap of 15,500 ids took more than two claims")
		}
	}
	b.drain(m)
}

// idleNoXid: with nothing to do, with burned ids at the head, and while a producer is at work, polls consume no xid.
func idleNoXid(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	still := func(what string) {
		for range 3 {
			c.take(m)
		}
		before := value[string](b.sessions[0], "select pg_snapshot_xmax(pg_current_snapshot())::text")
		for range 50 {
			c.poll(m, 100)
		}
		if after := value[string](b.sessions[0], "select pg_snapshot_xmax(pg_current_snapshot())::text"); after != before {
			b.failf("xid counter went from %s to %s in 50 idle polls, %s", before, after, what)
		}
	}
	still("on an empty topic")
	p.produce()
	still("when caught up")
	p.do("begin")
	p.produce()
	p.do("rollback")
	still("with burned ids at the head")
	b.drain(m)
}

// racingClaims: a claim waits for the one before it, and takes what that has left.
func racingClaims(b *bench, m mode) {
	p, c, d := b.session("p"), b.session("c"), b.session("d")
	for range 6 {
		p.produce()
	}
	b.session("observer").poll(m, 0)
	c.do("begin")
	first := c.poll(plain, 4)
	var second []leased
	polled := d.beginFunc("poll", func() (err error) { second, err = d.tryPoll(m, 4); return err })
	polled.mustBlock()
	c.do("commit")
	polled.end()
	for _, r := range append(first, second...) {
		if r.ID != nil {
			c.fetch(*r.ID)
		}
	}
	b.drain(m)
}

// expire ends all leases.
func (b *bench) expire() {
	s := b.session("clock")
	s.do("update weir.lease set expires_at = clock_timestamp()")
	s.do("update weir.delivery set due_at = clock_timestamp() where state = 'leased'")
}

// staleHolder: after a takeover, also by a consumer of the same name, the former holder can do nothing with the lease.
func staleHolder(b *bench, m mode) {
	b.session("p").produce()
	c, again := b.session("c"), b.session("c")
	old := *c.poll(m, 100)[0].ID
	b.expire()
	rows := again.poll(m, 100)
	if len(rows) != 1 || rows[0].State != "takeover" || *rows[0].Attempt != 2 {
		b.failf("expected a takeover, got %+v", rows)
	}
	for _, act := range []string{"select weir.ack($1, $2)", "select weir.extend($1, $2, '1 min')", "select weir.release($1, $2)", "select weir.fail($1, $2, 1, 'late')"} {
		if value[bool](c, act, old, "c") {
			b.failf("late acknowledgement accepted: %s by the former holder", act)
		}
	}
	again.fetch(*rows[0].ID)
	if !value[bool](again, "select weir.ack($1, $2)", *rows[0].ID, "c") {
		b.failf("the new holder's acknowledgement was refused")
	}
	b.drain(m)
}

// lateAck: what has expired is lost, also when nobody has taken it over.
func lateAck(b *bench, m mode) {
	b.session("p").produce()
	c := b.session("c")
	lease := *c.poll(m, 100)[0].ID
	b.expire()
	if value[bool](c, "select weir.ack($1, 'c')", lease) {
		b.failf("late acknowledgement accepted")
	}
	if rows := c.poll(m, 0, lease); len(rows) != 1 || rows[0].State != "lost" {
		b.failf("late acknowledgement accepted with a poll: %+v", rows)
	}
	if value[bool](c, "select weir.extend($1, 'c', '1 min')", lease) {
		b.failf("an expired lease was extended")
	}
	b.drain(m)
}

// foreignAck: only the holder can acknowledge, fail, extend or release.
func foreignAck(b *bench, m mode) {
	b.session("p").produce()
	c := b.session("c")
	lease := *c.poll(m, 100)[0].ID
	for _, act := range []string{"select weir.ack($1, 'x')", "select weir.extend($1, 'x', '1 min')", "select weir.release($1, 'x')", "select weir.fail($1, 'x', 1, '')"} {
		if value[bool](c, act, lease) {
			b.failf("%s by another consumer was accepted", act)
		}
	}
	c.fetch(lease)
	c.do("select weir.ack($1, 'c')", lease)
	b.drain(m)
}

// peerHasLease: an expired lease that a peer is at is left to it; the claim falls through to fresh messages.
func peerHasLease(b *bench, m mode) {
	p, c, l := b.session("p"), b.session("c"), b.session("l")
	p.produce()
	c.poll(m, 100)
	b.expire()
	l.do("begin")
	l.do("select from weir.lease for update")
	id := p.produce()
	d := b.session("d")
	var rows []leased
	b.until("there is something to take", func() bool {
		polled := d.beginFunc("poll", func() (err error) { rows, err = d.tryPoll(m, 100); return err })
		if polled.blocked() {
			b.failf("a poll waits for a peer's lease")
		}
		polled.end()
		return len(rows) > 0 && rows[0].State != "waiting" // l holds back xmin
	})
	if len(rows) != 1 || rows[0].State != "fresh" || *rows[0].High != id {
		b.failf("expected a fresh claim of %d, got %+v", id, rows)
	}
	d.fetch(*rows[0].ID)
	d.do("select weir.ack($1, 'd')", *rows[0].ID)
	l.do("rollback")
	b.drain(m)
}

// doneKept: what a holder had handled when it released its lease is not handed out again.
func doneKept(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	for range 3 {
		p.produce()
	}
	lease := *c.poll(m, 100)[0].ID
	if !value[bool](c, "select weir.release($1, 'c', '{2}')", lease) {
		b.failf("release was refused")
	}
	b.got[2]++
	rows := c.poll(m, 100)
	if len(rows) != 1 || *rows[0].Attempt != 1 {
		b.failf("a released lease was to come back with attempt 1, got %+v", rows)
	}
	c.fetch(*rows[0].ID)
	c.do("select weir.ack($1, 'c')", *rows[0].ID)
	b.drain(m)
}

// failedOnce: a message that failed comes back by itself, and is in its range no more, also when that is taken over.
func failedOnce(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	for range 3 {
		p.produce()
	}
	lease := *c.poll(m, 100)[0].ID
	for range 2 { // the second time changes nothing
		if !value[bool](c, "select weir.fail($1, 'c', 2, 'no')", lease) {
			b.failf("fail was refused")
		}
	}
	b.expire()
	b.drain(m)
	if n := value[int](c, "select count(*)::int from weir.deliveries"); n != 0 {
		b.failf("%d deliveries are left", n)
	}
}

// poison: a message whose process dies with it is dead after max_attempts leases, and its neighbours are handled.
func poison(b *bench, m mode) {
	p, c := b.session("p"), b.session("c")
	for range 3 {
		p.produce()
	}
	leases := 0
	b.until("the poison is dead", func() bool {
		for _, r := range c.poll(m, 100) {
			if r.ID == nil {
				continue
			}
			ids := value[[]int64](c, "select array_agg(id) from weir.fetch($1)", *r.ID)
			if slices.Contains(ids, 2) {
				leases++
				if leases > 5 {
					b.failf("message 2 was handed out %d times, max_attempts is 3", leases)
				}
				continue // the process dies, and its leases with it
			}
			for _, id := range ids {
				b.got[id]++
			}
			c.do("select weir.ack($1, 'c')", *r.ID)
		}
		b.expire()
		return value[int](c, "select count(*)::int from weir.dead_letters") > 0
	})
	if leases != 3 {
		b.failf("message 2 is dead after %d leases, not 3", leases)
	}
	b.got[2]++
	if id := value[int64](c, "select message_id from weir.dead_letters"); id != 2 {
		b.failf("message %d is dead, not 2", id)
	}
	b.drain(m)
}

// fetchInClaim: claim and fetch in one statement read what the claim has proven, not what the statement's snapshot holds.
func fetchInClaim(b *bench, m mode) {
	c := b.session("c")
	b.session("p").produce()
	b.session("p").produce()
	rows, err := c.conn.Query(context.Background(), "select f.id from weir.claim('t', 'g', 'c') as k, lateral weir.fetch(k.lease_id) as f")
	if err != nil {
		b.failf("claim and fetch: %w", err)
	}
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			b.failf("claim and fetch: %w", err)
		}
		b.got[id]++
	}
	if rows.Err() != nil {
		b.failf("claim and fetch: %w", rows.Err())
	}
	b.drain(m)
}

// lateLease: a lease that is taken late in a long transaction has its full length.
func lateLease(b *bench, _ mode) {
	c := b.session("c")
	b.session("p").produce()
	c.do("begin")
	c.do("select pg_sleep(0.2)")
	c.do("select weir.claim('t', 'g', 'c', 100, '150 ms')")
	if !value[bool](c, "select expires_at - now() > interval '300 ms' from weir.leases") {
		b.failf("the lease was counted from the transaction's beginning")
	}
	c.do("rollback")
	b.drain(plain)
}

// caseOne: the order of commits from the field. T1 draws an id and stays open, T2 commits the next three, commits land
// between the poller's statements, the start position sits on a rolled-back id, then T1 commits.
func caseOne(b *bench, m mode) {
	one, two, c := b.session("one"), b.session("two"), b.session("c")
	two.do("begin")
	rolled := two.produce()
	two.do("rollback")
	c.take(m)
	c.do("select weir.create_group('t', 'late', $1)", fmt.Sprintf(`{"start": {"id": %d}}`, rolled))
	c.do("select weir.create_group('t', 'early')")
	one.do("begin")
	held := one.produce()
	two.do("begin")
	for range 3 {
		two.produce()
	}
	rows := c.poll(m, 100)
	two.do("commit")
	for _, r := range rows {
		if r.ID != nil {
			b.failf("phantom: %+v before anything was committed", r)
		}
	}
	for _, group := range []string{"g", "late", "early"} {
		for range 3 {
			c.do("select weir.claim('t', $1, 'c')", group)
		}
		if at := value[int64](c, "select claimed from weir.groups where grp = $1", group); at >= held {
			b.failf("the cursor of %s is at %d, past %d, which is not committed", group, at, held)
		}
	}
	one.do("commit")
	for _, group := range []string{"late", "early"} {
		b.until("group "+group+" has all", func() bool {
			c.do("select weir.claim('t', $1, 'c')", group)
			return value[int64](c, "select claimed from weir.groups where grp = $1", group) == held+3
		})
		if n := value[int](c, `select count(*)::int from weir.leases as l, lateral weir.fetch(l.lease_id) where grp = $1`, group); n != 4 {
			b.failf("group %s got %d messages, not 4", group, n)
		}
	}
	b.drain(m)
}
