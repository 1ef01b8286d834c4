package weir

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// The least time between two NOTIFYs of a client is notifyEach for each wake-up that the first had, notifyMost at the longest: a
	// burst of produces shares one, and what comes now and then does not wait.
	notifyEach = 200 * time.Microsecond
	notifyMost = 5 * time.Millisecond
	// pingEvery and pingWithin find a connection that is half open: nothing comes, and nothing says that nothing can.
	pingEvery  = 8 * time.Second
	pingWithin = 5 * time.Second
)

// waker carries hints that a topic has new messages, from producers to consumers: within the client at once, between
// processes by NOTIFY. A hint may be lost at any time; the consumers' poll finds what it was about.
//
// NOTIFY is sent after the producing transaction, in one of its own: within it, it would take a lock of the whole database
// at commit, and every producer would wait for every other.
type waker struct {
	c       *Client
	channel string
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	sends   sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	dirty     map[string]int // topics to notify of, and how many wake-ups each had
	sending   bool
	waiting   map[string]map[chan struct{}]bool // topic -> consumers
	listening atomic.Bool
	// backend is the server's process for the connection that listens, 0 while there is none.
	backend  atomic.Int64
	listener context.CancelFunc
}

func (w *waker) init(c *Client) {
	w.c = c
	w.channel = "weir:" + c.schema
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.dirty = map[string]int{}
	w.waiting = map[string]map[chan struct{}]bool{}
}

// background runs what the client does by itself, until it is closed.
func (w *waker) background(run func(ctx context.Context)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.running.Go(func() { run(w.ctx) })
	}
}

func (w *waker) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	// A hint that is on its way is let out, or nobody would hear of what a short-lived producer did before the next poll.
	sent := make(chan struct{})
	go func() { w.sends.Wait(); close(sent) }()
	select {
	case <-sent:
	case <-time.After(time.Second):
	}
	w.cancel()
	w.sends.Wait()
	w.running.Wait()
}

// Wake tells the consumers of a topic that it has new messages. Produce does so by itself; call it after the commit of a
// transaction that ProduceTx, ProduceSQL or plain SQL produced in. It does not wait and cannot fail: without it the
// consumers' poll finds the messages.
func (c *Client) Wake(topic string) {
	w := &c.waker
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signal(topic)
	if !c.listen || w.closed {
		return
	}
	w.dirty[topic]++
	if !w.sending {
		w.sending = true
		w.sends.Go(w.send)
	}
}

// signal wakes the consumers of this client. The caller holds mu.
func (w *waker) signal(topic string) {
	for ch := range w.waiting[topic] {
		select {
		case ch <- struct{}{}:
		default: // it has a hint already
		}
	}
}

// send notifies other processes until nothing is left to tell.
func (w *waker) send() {
	for {
		w.mu.Lock()
		var topics []string
		wakes := 0
		for t, n := range w.dirty {
			topics = append(topics, t)
			wakes += n
		}
		clear(w.dirty)
		if len(topics) == 0 || w.ctx.Err() != nil {
			w.sending = false
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		ctx, cancel := context.WithTimeout(w.ctx, pingWithin)
		err := w.c.query(ctx, nil, "wake", []any{w.channel, topics}, nil)
		cancel()
		if err != nil && w.ctx.Err() == nil {
			w.c.log.Debug("could not notify consumers", logError, err)
		}
		pause(w.ctx, min(time.Duration(wakes)*notifyEach, notifyMost))
	}
}

// subscribe returns a channel that receives hints about a topic until stop is called. The first subscriber makes the client
// listen.
func (w *waker) subscribe(topic string) (hints chan struct{}, stop func()) {
	hints = make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting[topic] == nil {
		w.waiting[topic] = map[chan struct{}]bool{}
	}
	w.waiting[topic][hints] = true
	if w.c.listen && w.listener == nil && !w.closed {
		var ctx context.Context
		ctx, w.listener = context.WithCancel(w.ctx)
		w.running.Go(func() { w.listen(ctx) })
	}
	return hints, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.waiting[topic], hints)
		if len(w.waiting[topic]) == 0 {
			delete(w.waiting, topic)
		}
		if len(w.waiting) == 0 && w.listener != nil {
			w.listener()
			w.listener = nil
		}
	}
}

// listen keeps a connection that receives the hints of other processes.
func (w *waker) listen(ctx context.Context) {
	warned := false
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		began := time.Now()
		err := w.listenOnce(ctx)
		w.listening.Store(false)
		w.backend.Store(0)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			wait, warned = time.Second, false
		}
		if !warned {
			w.c.log.Warn("cannot listen for wake-ups, polling goes on", logError, err)
			warned = true
		}
		pause(ctx, jitter(wait))
	}
}

func (w *waker) listenOnce(ctx context.Context) error {
	pool := w.c.pool.Config()
	config := pool.ConnConfig
	config.ConnectTimeout = pingWithin
	if pool.BeforeConnect != nil { // a password that changes, for example
		if err := pool.BeforeConnect(ctx, config); err != nil {
			return err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer func() {
		// In the background, not to hold up a stop: a half-open connection does not even close at once.
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if _, err := conn.Exec(ctx, "listen "+pgx.Identifier{w.channel}.Sanitize()); err != nil {
		return err
	}
	w.listening.Store(true)
	w.backend.Store(int64(conn.PgConn().PID()))
	// What was told before this connection listened is lost: let everyone look once.
	w.mu.Lock()
	for topic := range w.waiting {
		w.signal(topic)
	}
	w.mu.Unlock()
	for {
		waiting, cancel := context.WithTimeout(ctx, pingEvery)
		n, err := conn.WaitForNotification(waiting)
		expired := waiting.Err() != nil && ctx.Err() == nil
		cancel()
		if n != nil {
			w.mu.Lock()
			w.signal(n.Payload)
			w.mu.Unlock()
			continue
		}
		if !expired {
			return err
		}
		ping, cancel := context.WithTimeout(ctx, pingWithin)
		err = conn.Ping(ping)
		cancel()
		if err != nil {
			return err
		}
	}
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// jitter takes up to half of a duration away, so that what failed together is not tried again together.
func jitter(d time.Duration) time.Duration {
	return d - time.Duration(rand.Int64N(int64(d)/2+1))
}
