package weir

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// One claim takes no more than this, whatever there is room for: the server spills larger results to disk.
	claimMessages = 1000
	claimBytes    = 3 << 20
	// callTimeout bounds each call to the server, so that a half-open connection is given up.
	callTimeout = 10 * time.Second
	// grace is what a handler has to return after its context has ended.
	grace = time.Second
	// maxRetryIn is the longest that RetryIn postpones a message.
	maxRetryIn = 365 * 24 * time.Hour
	// inPlace is how often a handler is called again at once after an error that is not the message's fault.
	inPlace = 3
	// A claim that took all there was is followed by the next one after paceEach for each of its messages, paceMost at the longest:
	// where many come, claims have many; where few come, nothing waits for long. Without it each of 500 small transactions a second
	// cost a claim, an empty poll and an acknowledgement.
	paceEach = 200 * time.Microsecond
	paceMost = 5 * time.Millisecond
)

// run is one Run of a consumer: a turn loop that claims and acknowledges, workers that handle, and a keeper that renews
// leases and watches handlers. All state is under mu.
//
// A message goes: claimed -> queue -> an execution -> settled. Its lease is acknowledged when all its messages are settled.
// Settled is what needs no more handling: handled, or stored as a delivery of its own. In an ordered group only the first message
// of a key in a lease is in the queue; the next one follows when that is settled, and none when it failed.
type run struct {
	k *Consumer
	c *Client
	// mode of the group; in an ordered one, one message of a key at a time
	mode Mode

	// base outlives the context of Run: it ends when the run has settled everything that it could.
	base   context.Context
	finish context.CancelFunc
	tasks  sync.WaitGroup

	mu    sync.Mutex
	work  *sync.Cond // queue or stopping changed
	queue []*item
	held  map[int64]*lease
	acks  []int64
	// failures are to be recorded; recording: a worker is at it
	failures  []*failed
	recording bool
	buffered  int   // messages claimed and not settled
	bytes     int64 // their payloads
	active    map[*execution]bool
	stopping  bool
	// apart: messages do not come along with a claim. Of the turn loop alone.
	apart bool

	// kick ends the turn loop's wait: there are leases to acknowledge, or room.
	kick chan struct{}
	// quiet is signalled when no execution is left.
	quiet chan struct{}
}

type lease struct {
	id    int64
	items []*item // in id order
	open  int     // how many of them are not settled
	// prefix is how many of them are settled without a gap
	prefix int
	// next are the messages, by key, that wait for an earlier one of their key
	next map[string][]*item
	// ended: acknowledged already, in a handler's transaction
	ended bool
	// single: it is a delivery's. Recording a failure ends it, while that of a range goes on.
	single bool
	// ending while a call is under way that may have ended it
	ending bool
	// deadline is when it has certainly expired, by this process's clock: that of the last call that set it, plus its length.
	deadline time.Time
	lost     bool
}

type item struct {
	message *raw
	lease   *lease
	// gone once it is settled or dropped: it counts no more
	gone bool
	// done once it is settled
	done bool
	// alone: it is handled in an execution of its own
	alone bool
	// unsure: a commit that acknowledged it failed, so that it may be acknowledged all the same
	unsure bool
}

// execution is one call of the handler.
type execution struct {
	items     []*item
	timeout   time.Duration // how long it may take; not positive: without limit
	cancel    context.CancelCauseFunc
	began     time.Time // zero once it no longer runs the handler
	abandoned bool
}

func newRun(ctx context.Context, k *Consumer) *run {
	r := &run{
		k: k, c: k.c,
		held:   map[int64]*lease{},
		active: map[*execution]bool{},
		kick:   make(chan struct{}, 1),
		quiet:  make(chan struct{}, 1),
	}
	r.work = sync.NewCond(&r.mu)
	r.base, r.finish = context.WithCancel(context.WithoutCancel(ctx))
	return r
}

func (r *run) serve(ctx context.Context) error {
	defer r.finish()
	call, done := r.callContext(ctx)
	mode, err := one[string](call, r.c, nil, "group_info", r.k.topic, r.k.group)
	done()
	if err != nil && r.permanent(err) {
		return wrap(err, "consume topic %q as group %q", r.k.topic, r.k.group)
	}
	for err != nil && ctx.Err() == nil { // the mode has to be known before anything is handled
		r.log("consumer cannot reach its group, it tries again", logError, err)
		pause(ctx, jitter(time.Second))
		call, done := r.callContext(ctx)
		mode, err = one[string](call, r.c, nil, "group_info", r.k.topic, r.k.group)
		done()
		if err != nil && r.permanent(err) {
			return wrap(err, "consume topic %q as group %q", r.k.topic, r.k.group)
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	r.mode = Mode(mode)
	if r.mode == Queue && r.k.prefetchDefault {
		r.k.o.Prefetch = max(1, r.k.o.Concurrency*r.k.o.BatchSize)
	}
	hints, unsubscribe := r.c.waker.subscribe(r.k.topic)
	defer unsubscribe()
	for range r.k.o.Concurrency {
		r.tasks.Go(r.worker)
	}
	r.tasks.Go(r.keep)
	r.tasks.Go(r.present)
	err = r.turns(ctx, hints)
	r.stop()
	return wrap(err, "consume topic %q as group %q", r.k.topic, r.k.group)
}

// permanent reports whether an error will be the same the next time.
func (r *run) permanent(err error) bool {
	for _, e := range []error{ErrTopicNotFound, ErrGroupNotFound, ErrInvalid, ErrSchemaMissing, ErrSchemaOld, ErrSchemaNew, ErrServer} {
		if errors.Is(err, e) {
			return true
		}
	}
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "42501"
}

// callContext bounds a call to the server. The end of ctx does not cut it off at once: a claim that the server has made and
// whose answer is thrown away would be nobody's until its lease expires.
func (r *run) callContext(ctx context.Context) (context.Context, context.CancelFunc) {
	call, cancel := context.WithTimeout(r.base, callTimeout)
	stop := context.AfterFunc(ctx, func() {
		pause(call, 2*time.Second)
		cancel()
	})
	return call, func() { stop(); cancel() }
}

// turns claims and acknowledges until ctx ends or going on is pointless.
func (r *run) turns(ctx context.Context, hints <-chan struct{}) error {
	var (
		idle     time.Duration // how long to wait when nothing happens
		failures int
		warned   time.Time
		blocked  time.Time // since when messages wait for the fence, without a break
		told     time.Time
	)
	timer := time.NewTimer(0)
	defer timer.Stop()
	ahead := true
	for {
		t, err := r.turn(ctx, ahead)
		if t.pace > 0 {
			pause(ctx, t.pace)
		}
		if ctx.Err() != nil {
			return nil
		}
		limit := r.k.o.PollInterval
		switch {
		case err != nil:
			if r.permanent(err) {
				return err
			}
			if errors.Is(err, context.DeadlineExceeded) {
				// A network that loses everything leaves all connections half open, and each would cost a call its time limit.
				r.c.pool.Reset()
			}
			if now := time.Now(); now.Sub(warned) > 10*time.Second {
				r.log("consumer cannot reach its group, it tries again", logError, err)
				warned = now
			}
			failures++
			idle = jitter(min(50*time.Millisecond<<min(failures, 6), 2*time.Second))
		default:
			if failures > 0 {
				r.c.log.Info("consumer reaches its group again", logTopic, r.k.topic, logGroup, r.k.group, logConsumer, r.k.o.Name)
				failures, warned = 0, time.Time{}
			}
			switch now := time.Now(); {
			case !t.waiting:
				blocked, told = time.Time{}, time.Time{}
			case blocked.IsZero():
				blocked = now
			case r.k.o.BlockedAfter > 0 && now.Sub(blocked) > r.k.o.BlockedAfter && now.Sub(told) > time.Minute:
				r.warnBlocked(blocked)
				told = now
			}
			switch {
			case t.got:
				idle = 0
			case t.waiting:
				// A commit elsewhere ends this, and nothing announces it for certain.
				idle = min(max(2*idle, time.Millisecond), limit/4)
			case r.c.waker.listening.Load():
				idle = limit
			default:
				idle = min(max(2*idle, 5*time.Millisecond), limit)
			}
		}
		ahead = true
		if t.got && r.room() > 0 {
			continue
		}
		wait := idle
		if t.later > 0 {
			wait = min(wait, t.later)
		}
		if t.got {
			wait = limit // no room: a kick comes when there is
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			ahead = t.waiting
		case <-r.kick:
		case <-hints:
			idle = 0
		}
	}
}

// room is how many messages to claim now. It is 0 until half of what may be prefetched is settled, so that claims are not
// made one message at a time; in a queue group, whose messages are slow jobs and another's as well, until a worker is idle.
func (r *run) room() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.roomLocked()
}

func (r *run) roomLocked() int {
	room := r.k.o.Prefetch - r.buffered
	enough := room*2 >= r.k.o.Prefetch || r.mode == Queue && len(r.queue) == 0
	if r.stopping || !enough || r.bytes*2 > r.k.o.PrefetchBytes {
		return 0
	}
	return max(0, min(room, claimMessages))
}

// claim is a row of weir.poll.
type claim struct {
	state             string
	id, low, high, at *int64
}

// poll sends weir.poll. ahead has the messages come in the same flight, when a single range is claimed; where they do not, they are to be
// fetched. The claim is committed before that: a client that stops reading must not hold what others wait for.
func (r *run) poll(ctx context.Context, ahead bool, args ...any) (claims []claim, messages []*raw, err error) {
	scan := func(rows pgx.Rows) error {
		var c claim
		err := rows.Scan(&c.state, &c.id, &c.low, &c.high, &c.at)
		claims = append(claims, c)
		return err
	}
	if !ahead || r.apart {
		err := r.c.query(ctx, nil, "poll", args, scan)
		return claims, nil, err
	}
	if err := r.c.ready(ctx, nil); err != nil {
		return nil, nil, err
	}
	var flight pgx.Batch
	flight.Queue("begin isolation level read committed")
	flight.Queue(r.c.text("poll"), args...)
	flight.Queue("commit")
	flight.Queue(r.c.text("fetch_claimed"))
	results := r.c.pool.SendBatch(ctx, &flight)
	defer func() { _ = results.Close() }() // what it says has been said
	if _, err := results.Exec(); err != nil {
		return nil, nil, explain(err)
	}
	rows, err := results.Query()
	if err == nil {
		err = each(rows, scan)
	}
	if err == nil {
		_, err = results.Exec()
	}
	if err != nil {
		return nil, nil, explain(err)
	}
	rows, err = results.Query()
	if err == nil {
		err = each(rows, collect(&messages))
	}
	if err != nil {
		r.apart = r.permanent(err) // the role may not call weir.claimed, say
		messages = nil
	}
	return claims, messages, nil
}

// turned is what came of a turn.
type turned struct {
	// got: something was claimed; waiting: messages wait for the fence
	got, waiting bool
	// pace is how long to wait at least before the next turn
	pace time.Duration
	// later is when a lease expires or a delivery is due, 0 if none is known of
	later time.Duration
}

// turn acknowledges what is settled, and claims what there is room for. ahead: there is something to claim, as far as one can know.
func (r *run) turn(ctx context.Context, ahead bool) (t turned, err error) {
	r.mu.Lock()
	acks := r.acks
	r.acks = nil
	room := r.roomLocked()
	size := max(1, min(r.k.o.PrefetchBytes-r.bytes, claimBytes))
	r.mu.Unlock()
	if room == 0 && len(acks) == 0 {
		return t, nil
	}
	var acked any
	if len(acks) > 0 {
		acked = acks
	}
	began := time.Now()
	call, done := r.callContext(ctx)
	defer done()
	claims, messages, err := r.poll(call, ahead && room > 0, r.k.topic, r.k.group, r.k.o.Name, room, r.k.o.Lease.Seconds(), size, acked)
	if err != nil {
		// Whether the leases were acknowledged is not known: ask again, which tells them lost if they were.
		r.mu.Lock()
		r.acks = append(acks, r.acks...)
		r.mu.Unlock()
		return t, err
	}
	var (
		deliveries []int64
		ranges     []int64
		lost       []int64
	)
	for _, c := range claims {
		switch c.state {
		case "fresh", "takeover":
			ranges = append(ranges, *c.id)
		case "retry":
			deliveries = append(deliveries, *c.id)
		case "lost":
			lost = append(lost, *c.id)
		case "waiting":
			t.waiting = true
		case "later":
			t.later = time.Duration(*c.high) * time.Millisecond
		}
	}
	r.mu.Lock()
	for _, id := range acks {
		delete(r.held, id)
	}
	for _, id := range ranges {
		r.held[id] = &lease{id: id, deadline: began.Add(r.k.o.Lease)}
	}
	for _, id := range deliveries {
		r.held[id] = &lease{id: id, deadline: began.Add(r.k.o.Lease), single: true}
	}
	r.mu.Unlock()
	if len(lost) > 0 {
		r.k.stats.lost.Add(int64(len(lost)))
		r.log("acknowledgement refused, the lease was lost: its messages are handed out again", logCount, len(lost), logLease, lost[0])
	}
	n := 0
	switch {
	case len(messages) > 0 && len(ranges) == 1 && messages[0].lease == ranges[0]:
		n = r.take(ranges, messages)
	case len(ranges) == 1 && len(deliveries) == 0:
		n = r.load(ctx, "fetch", ranges)
	case len(ranges)+len(deliveries) > 0:
		n = r.load(ctx, "fetch_many", append(slices.Clone(ranges), deliveries...))
	}
	// A claim that took less than half of what it might have took all there was, or the end of a segment.
	if r.mode == Stream && n*2 < room {
		t.pace = min(time.Duration(n)*paceEach, paceMost)
	}
	t.got = len(ranges)+len(deliveries) > 0
	return t, nil
}

// load reads the messages of leases and queues them: fetch those of one, fetch_many those of many. It returns how many.
func (r *run) load(ctx context.Context, statement string, ids []int64) int {
	var wanted any = ids
	if statement == "fetch" {
		wanted = ids[0]
	}
	var messages []*raw
	for try := 1; ; try++ {
		call, done := r.callContext(ctx)
		var err error
		messages, err = r.c.received(call, statement, wanted)
		done()
		if err == nil {
			break
		}
		if errors.Is(err, ErrLeaseLost) || try == 3 || ctx.Err() != nil {
			r.log("cannot read claimed messages, they are released", logError, err)
			for _, id := range ids {
				r.release(id)
			}
			return 0
		}
		pause(ctx, jitter(100*time.Millisecond))
	}
	return r.take(ids, messages)
}

// take queues the messages of leases. It returns how many.
func (r *run) take(ids []int64, messages []*raw) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range messages {
		l := r.held[m.lease]
		if l == nil {
			continue
		}
		m.Topic, m.Group = r.k.topic, r.k.group
		l.open++
		r.buffered++
		r.bytes += int64(len(m.Raw))
		it := &item{message: m, lease: l}
		l.items = append(l.items, it)
		if r.mode == Ordered && m.Key != "" {
			waiting, busy := l.next[m.Key]
			if l.next == nil {
				l.next = map[string][]*item{}
			}
			if busy {
				l.next[m.Key] = append(waiting, it)
				continue
			}
			l.next[m.Key] = nil
		}
		r.queue = append(r.queue, it)
	}
	for _, id := range ids {
		if l := r.held[id]; l != nil && l.open == 0 { // all of it was settled by an earlier holder
			r.acks = append(r.acks, id)
			r.kicked()
		}
	}
	r.k.stats.buffered.Store(int64(r.buffered))
	r.work.Broadcast()
	return len(messages)
}

// release gives a lease back, with what of it is settled.
func (r *run) release(id int64) {
	r.mu.Lock()
	l := r.held[id]
	delete(r.held, id)
	var done []int64
	held := l != nil && !l.lost && !l.ended
	if l != nil {
		r.dropNext(l)
		for _, it := range l.items {
			if it.done {
				done = append(done, it.message.ID)
			}
		}
	}
	r.mu.Unlock()
	if !held {
		return
	}
	call, cancel := context.WithTimeout(r.base, 2*time.Second)
	defer cancel()
	if _, err := one[bool](call, r.c, nil, "release", id, r.k.o.Name, done); err != nil {
		r.log("cannot release a lease, it expires by itself", logLease, id, logError, err)
	}
}

// kicked ends the turn loop's wait. It never blocks.
func (r *run) kicked() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

// worker handles messages until the run stops, or it has lost its place.
func (r *run) worker() {
	for {
		e, ctx := r.next()
		if e == nil || !r.execute(ctx, e) {
			return
		}
	}
}

// next waits for messages and begins an execution of them; nil when the run stops.
func (r *run) next() (*execution, context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		for len(r.queue) == 0 && !r.stopping {
			r.work.Wait()
		}
		if r.stopping {
			return nil, nil
		}
		e := &execution{began: time.Now()}
		for len(r.queue) > 0 && len(e.items) < r.k.o.BatchSize {
			it := r.queue[0]
			if it.alone && len(e.items) > 0 {
				break
			}
			r.queue[0] = nil
			r.queue = r.queue[1:]
			// Whoever was suspended for longer than its lease finds that out here, before it begins what is another's now.
			if !it.lease.lost && e.began.After(it.lease.deadline) {
				r.lose(it.lease)
			}
			if it.lease.lost {
				r.dropped(it)
				continue
			}
			e.items = append(e.items, it)
			if it.alone {
				break
			}
		}
		if len(e.items) == 0 {
			continue
		}
		e.timeout = r.k.o.HandlerTimeout
		for _, it := range e.items {
			if len(e.items) == 1 && it.message.timeout > 0 {
				e.timeout = it.message.timeout
			}
		}
		ctx, cancel := context.WithCancelCause(r.base)
		e.cancel = cancel
		r.active[e] = true
		r.k.stats.executing.Store(int64(len(r.active)))
		return e, ctx
	}
}

// execute runs the handler and settles its messages. It returns false when the worker has lost its place.
func (r *run) execute(ctx context.Context, e *execution) (goOn bool) {
	defer e.cancel(nil)
	if e.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, e.timeout, ErrHandlerTimeout)
		defer cancel()
	}
	returned := false
	errs := make([]error, len(e.items))
	end := func() bool {
		r.mu.Lock()
		if e.abandoned {
			r.k.stats.hung.Add(-1)
			r.mu.Unlock()
			return false
		}
		// Still in r.active until its messages are settled, so that a stop waits for that; but not for the keeper.
		e.began = time.Time{}
		r.mu.Unlock()
		r.settle(ctx, e, errs)
		return true
	}
	defer func() {
		if !returned { // the handler ended the goroutine
			for i := range errs {
				errs[i] = errors.New("handler called runtime.Goexit")
			}
			r.tasks.Go(func() {
				if end() {
					r.worker()
				}
			})
		}
	}()
	todo := make([]int, len(e.items))
	for i := range todo {
		todo[i] = i
	}
	for try := 0; ; try++ {
		var again []int
		for _, some := range r.together(e, todo) {
			messages := make([]*raw, len(some))
			for k, i := range some {
				messages[k] = e.items[i].message
			}
			for k, err := range r.k.handler.call(ctx, &session{r: r, e: e}, messages) {
				errs[some[k]] = err
				if err != nil && transient(err) && ctx.Err() == nil {
					again = append(again, some[k])
				}
			}
		}
		if len(again) == 0 || try == inPlace {
			break
		}
		todo = again
		pause(ctx, jitter(20*time.Millisecond<<(2*try)))
	}
	returned = true
	return end()
}

// together divides messages of an execution, given by their places, among calls of the handler: one call, unless some of them may be
// acknowledged already. What a later acknowledgement says of those holds for none that were not among them.
func (r *run) together(e *execution, places []int) [][]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.ContainsFunc(places, func(i int) bool { return e.items[i].unsure }) {
		return [][]int{places}
	}
	return slices.Collect(slices.Chunk(places, 1))
}

// settle records the outcome of an execution, message by message.
func (r *run) settle(ctx context.Context, e *execution, errs []error) {
	cause := context.Cause(ctx)
	handled := int64(0)
	r.mu.Lock()
	for i, it := range e.items {
		if errs[i] == nil {
			handled++
			r.settled(it)
		}
	}
	r.mu.Unlock()
	r.k.stats.handled.Add(handled)
	for i, it := range e.items {
		err := errs[i]
		switch {
		case err == nil:
		case errors.Is(cause, ErrStopped):
			r.mu.Lock()
			r.dropped(it)
			r.mu.Unlock()
		case errors.Is(cause, ErrLeaseLost) || errors.Is(err, errNotHeld):
			r.again(it)
		default:
			if errors.Is(cause, ErrHandlerTimeout) && !errors.Is(err, ErrHandlerTimeout) {
				err = errors.Join(ErrHandlerTimeout, err)
			}
			r.fail(it, err)
		}
	}
	r.mu.Lock()
	r.ended(e)
	r.mu.Unlock()
}

// again hands a message to the handler once more, when the execution ended because a lease was lost, which need not be the
// message's: a batch is of several. Alone, since an acknowledgement of the batch may have been committed without our knowing, and
// what it then says of messages that were in it holds for none that join them.
func (r *run) again(it *item) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if it.gone || it.lease.lost || r.stopping {
		r.dropped(it)
		return
	}
	it.alone = true
	r.queue = slices.Insert(r.queue, 0, it)
	r.work.Signal()
}

// ended takes an execution off. The caller holds mu.
func (r *run) ended(e *execution) {
	delete(r.active, e)
	r.k.stats.executing.Store(int64(len(r.active)))
	if len(r.active) == 0 {
		select {
		case r.quiet <- struct{}{}:
		default:
		}
	}
}

// fail stores a message as a delivery of its own, with its error, until that is done or the lease is lost.
func (r *run) fail(it *item, failure error) {
	r.k.stats.failed.Add(1)
	outcome := "retry"
	var in *string
	var v *verdict
	switch {
	case errors.As(failure, &v) && v.dead:
		outcome = "dead"
	case errors.As(failure, &v):
		after := fmt.Sprintf("%.6f s", min(max(v.after, 0), maxRetryIn).Seconds())
		in = &after
		if !v.counts {
			outcome = "postpone"
		}
	case errors.Is(failure, ErrHandlerTimeout):
		// What the driver says of a context that has ended is no reason to leave the attempt out of the count.
	case transient(failure):
		outcome = "postpone"
	}
	// What the database cannot store as text must not keep the failure from being recorded.
	text := strings.ReplaceAll(strings.ToValidUTF8(failure.Error(), "\uFFFD"), "\x00", "\uFFFD")
	r.mu.Lock()
	it.lease.ending = it.lease.single
	r.mu.Unlock()
	f := &failed{lease: it.lease.id, message: it.message.ID, text: text, in: in, outcome: outcome, done: make(chan struct{})}
	leave := false
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		held, err := r.record(f)
		r.mu.Lock()
		gone := it.lease.lost || time.Now().After(it.lease.deadline)
		if err == nil && !held || err != nil && (gone || r.permanent(err) || r.base.Err() != nil) {
			r.lose(it.lease)
			r.dropped(it)
			r.mu.Unlock()
			return
		}
		if it.unsure && len(it.lease.next[it.message.Key]) > 0 {
			leave = true
			r.dropNext(it.lease)
		}
		r.mu.Unlock()
		if err == nil {
			r.recorded(it)
			if leave {
				// Had it been acknowledged, nothing was parked, and what follows of its key would be left out.
				r.release(it.lease.id)
				r.mu.Lock()
				r.lose(it.lease)
				r.mu.Unlock()
			}
			return
		}
		if wait == 50*time.Millisecond {
			r.log("cannot record a failure, it tries again", logMessage, it.message.ID, logError, err)
		}
		pause(r.base, jitter(wait))
	}
}

// failed is a failure to be recorded.
type failed struct {
	lease, message int64
	text, outcome  string
	in             *string
	// done is closed when held and err are there.
	done chan struct{}
	held bool
	err  error
}

// record stores a failure, together with those that come while another call is under way: when a dependency is down everything
// fails at once, and most of it in the same few leases.
func (r *run) record(f *failed) (held bool, err error) {
	f.done = make(chan struct{})
	r.mu.Lock()
	r.failures = append(r.failures, f)
	if r.recording {
		r.mu.Unlock()
		<-f.done
		return f.held, f.err
	}
	r.recording = true
	for len(r.failures) > 0 {
		now := r.failures[:min(len(r.failures), claimMessages)]
		r.failures = slices.Clone(r.failures[len(now):])
		r.mu.Unlock()
		r.recordAll(now)
		for _, f := range now {
			close(f.done)
		}
		r.mu.Lock()
	}
	r.recording = false
	r.mu.Unlock()
	return f.held, f.err
}

func (r *run) recordAll(list []*failed) {
	var (
		leases, messages []int64
		texts, outcomes  []string
		ins              []*string
	)
	for _, f := range list {
		leases, messages = append(leases, f.lease), append(messages, f.message)
		texts, outcomes, ins = append(texts, f.text), append(outcomes, f.outcome), append(ins, f.in)
	}
	call, cancel := context.WithTimeout(r.base, callTimeout)
	defer cancel()
	recorded := map[int64]bool{}
	err := r.c.query(call, nil, "fail_many", []any{leases, r.k.o.Name, messages, texts, ins, outcomes}, func(rows pgx.Rows) error {
		var id int64
		err := rows.Scan(&id)
		recorded[id] = true
		return err
	})
	for _, f := range list {
		f.held, f.err = recorded[f.message], err
	}
}

// settled counts a message as done; the last one of a lease has it acknowledged. The caller holds mu.
func (r *run) settled(it *item) {
	if it.gone {
		return
	}
	r.done(it)
	l := it.lease
	if waiting := l.next[it.message.Key]; len(waiting) > 0 && !l.lost {
		l.next[it.message.Key] = waiting[1:]
		r.queue = append(r.queue, waiting[0])
		r.work.Signal()
	} else {
		delete(l.next, it.message.Key)
	}
	r.acknowledge(l)
}

// done counts a message as settled. The caller holds mu.
func (r *run) done(it *item) {
	l := it.lease
	it.done = true
	l.open--
	for l.prefix < len(l.items) && l.items[l.prefix].done {
		l.prefix++
	}
	r.forget(it)
}

// acknowledge has a lease acknowledged whose messages are all settled. The caller holds mu.
func (r *run) acknowledge(l *lease) {
	switch {
	case l.open > 0 || l.lost:
	case l.ended:
		delete(r.held, l.id)
	default:
		r.acks = append(r.acks, l.id)
		r.kicked()
	}
}

// dropNext leaves to others what waits in a lease for an earlier message of its key. The caller holds mu.
func (r *run) dropNext(l *lease) {
	for _, waiting := range l.next {
		for _, it := range waiting {
			r.dropped(it)
		}
	}
	l.next = nil
}

// recorded counts a message as done whose failure is stored.
func (r *run) recorded(it *item) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if it.gone {
		return
	}
	l := it.lease
	if l.single {
		delete(r.held, l.id)
		r.dropped(it)
		r.kicked() // to hear when the retry is due
		return
	}
	r.done(it)
	// In an ordered group the server has parked what follows of its key.
	for _, next := range l.next[it.message.Key] {
		r.done(next)
	}
	delete(l.next, it.message.Key)
	r.acknowledge(l)
}

// dropped leaves a message to others. The caller holds mu.
func (r *run) dropped(it *item) {
	if !it.gone {
		r.forget(it)
	}
}

// forget frees what a message takes of the buffer. The caller holds mu.
func (r *run) forget(it *item) {
	before := r.roomLocked()
	it.gone = true
	r.buffered--
	r.bytes -= int64(len(it.message.Raw))
	r.k.stats.buffered.Store(int64(r.buffered))
	if now := r.roomLocked(); now > 0 && (before == 0 || r.mode == Queue) {
		r.kicked()
	}
}

// lose marks a lease as another's, and ends the handlers that work on it. The caller holds mu.
func (r *run) lose(l *lease) {
	if l.lost {
		return
	}
	l.lost = true
	delete(r.held, l.id)
	r.dropNext(l)
	r.k.stats.lost.Add(1)
	r.log("lease lost: its messages are handed out again", logLease, l.id)
	for e := range r.active {
		for _, it := range e.items {
			if it.lease == l {
				e.cancel(ErrLeaseLost)
				break
			}
		}
	}
}

// keep renews leases at a third of their length, and takes the place of handlers that outlive their time.
func (r *run) keep() {
	tick := min(max(r.k.o.Lease/20, 5*time.Millisecond), 500*time.Millisecond)
	if r.k.o.HandlerTimeout > 0 {
		tick = min(tick, max(r.k.o.HandlerTimeout/4, 5*time.Millisecond))
	}
	next := time.Now().Add(r.k.o.Lease / 3)
	for {
		pause(r.base, tick)
		if r.base.Err() != nil {
			return
		}
		r.watch()
		if now := time.Now(); now.After(next) {
			if r.renew() {
				next = now.Add(r.k.o.Lease / 3)
			} else {
				next = now.Add(min(r.k.o.Lease/10, time.Second))
			}
		}
	}
}

// watch abandons executions that go on a second after their time, and loses leases that have certainly expired.
func (r *run) watch() {
	now := time.Now()
	var hung []*execution
	r.mu.Lock()
	for e := range r.active {
		if e.timeout > 0 && !e.began.IsZero() && now.Sub(e.began) > e.timeout+grace {
			hung = append(hung, e)
			r.abandon(e)
		}
	}
	for _, l := range r.held {
		if l.open > 0 && now.After(l.deadline) {
			r.lose(l)
		}
	}
	r.mu.Unlock()
	for _, e := range hung {
		r.log("handler ignores the end of its context, its place is given to another", logMessage, e.items[0].message.ID)
		r.tasks.Go(func() {
			for _, it := range e.items {
				r.fail(it, ErrHandlerTimeout)
			}
			r.mu.Lock()
			r.ended(e)
			r.mu.Unlock()
			r.worker()
		})
	}
}

// abandon takes an execution's messages from it: what its handler does from now on counts for nothing. Its goroutine is not
// waited for. The caller holds mu.
func (r *run) abandon(e *execution) {
	e.abandoned = true
	e.began = time.Time{}
	r.k.stats.hung.Add(1)
}

// renew extends all leases; false: try again soon.
func (r *run) renew() bool {
	r.mu.Lock()
	ids := make([]int64, 0, len(r.held))
	for id, l := range r.held {
		if l.open > 0 {
			ids = append(ids, id)
		}
	}
	r.mu.Unlock()
	if len(ids) == 0 {
		return true
	}
	began := time.Now()
	call, cancel := context.WithTimeout(r.base, callTimeout)
	defer cancel()
	still := map[int64]bool{}
	err := r.c.query(call, nil, "extend", []any{ids, r.k.o.Name, r.k.o.Lease.Seconds()}, func(rows pgx.Rows) error {
		var id int64
		err := rows.Scan(&id)
		still[id] = true
		return err
	})
	if err != nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range ids {
		l := r.held[id]
		switch {
		case l == nil:
		case still[id]:
			l.deadline = began.Add(r.k.o.Lease)
		case l.open > 0 && !l.ending: // else it was acknowledged or ended meanwhile
			r.lose(l)
		}
	}
	return true
}

// stop ends a run: running handlers finish or are cut off, then everything is acknowledged or released.
func (r *run) stop() {
	r.mu.Lock()
	r.stopping = true
	for _, it := range r.queue {
		r.dropped(it)
	}
	r.queue = nil
	for _, l := range r.held {
		r.dropNext(l)
	}
	r.work.Broadcast()
	r.mu.Unlock()

	if !r.calm(r.k.o.StopTimeout) {
		r.mu.Lock()
		for e := range r.active {
			e.cancel(ErrStopped)
		}
		r.mu.Unlock()
		if !r.calm(grace) {
			r.mu.Lock()
			n := 0
			for e := range r.active {
				if !e.began.IsZero() {
					r.abandon(e)
					n++
				}
				for _, it := range e.items {
					r.dropped(it)
				}
			}
			clear(r.active)
			r.k.stats.executing.Store(0)
			r.mu.Unlock()
			r.log("handlers did not stop in time, their messages are released", logCount, n)
		}
	}

	deadline := time.Now().Add(5 * time.Second)
	for {
		r.mu.Lock()
		left := len(r.acks)
		r.mu.Unlock()
		if left == 0 {
			break
		}
		if _, err := r.turn(r.base, false); err != nil {
			if time.Now().After(deadline) || r.permanent(err) {
				r.log("cannot acknowledge handled messages, they are handed out again", logError, err)
				break
			}
			pause(r.base, 100*time.Millisecond)
		}
	}
	r.mu.Lock()
	open := make([]int64, 0, len(r.held))
	for id := range r.held {
		open = append(open, id)
	}
	r.mu.Unlock()
	for _, id := range open {
		r.release(id)
	}
	r.absent()
	r.finish()
	r.tasksDone()
}

// tasksDone waits for workers and keeper, but not for handlers that were abandoned.
func (r *run) tasksDone() {
	done := make(chan struct{})
	go func() { r.tasks.Wait(); close(done) }()
	if r.k.stats.hung.Load() == 0 {
		<-done
		return
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// calm waits until no execution is left, at most d (negative: without limit).
func (r *run) calm(d time.Duration) bool {
	var limit <-chan time.Time
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		limit = t.C
	}
	for {
		r.mu.Lock()
		left := len(r.active)
		r.mu.Unlock()
		if left == 0 {
			return true
		}
		select {
		case <-r.quiet:
		case <-limit:
			return false
		}
	}
}

// log tells an operator of something that is survived.
func (r *run) log(message string, args ...any) {
	r.c.log.Warn(message, append([]any{logTopic, r.k.topic, logGroup, r.k.group, logConsumer, r.k.o.Name}, args...)...)
}
