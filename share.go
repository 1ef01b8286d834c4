package weir

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

const (
	// A shared transaction takes no more than this; calls that bring more have one of their own.
	sharedMessages = 500
	sharedBytes    = 1 << 20
)

// sharing has concurrent Produce calls share transactions: what arrives while others are under way goes together with the next. A call
// that is alone waits for nobody.
type sharing struct {
	mu     sync.Mutex
	topics map[string]*shared
}

type shared struct {
	waiting []*sharedCall
	// active: a transaction is under way. With two at a time each had half of the calls, and all of the work around them: 6,000
	// messages a second with 16 callers, where one at a time gave 7,900.
	active bool
}

// sharedCall is one Produce call.
type sharedCall struct {
	batch *batch
	// ctx is that of a call that has the transaction for itself
	ctx  context.Context
	lone atomic.Bool
	// done is closed when the rest is there
	done     chan struct{}
	produced []Produced
	err      error
	// alone: the transaction was refused, perhaps for another call's sake, and nothing of it is stored
	alone bool
}

// produceShared is produceOwn, together with other calls.
func (c *Client) produceShared(ctx context.Context, topic string, messages []Message) ([]Produced, error) {
	info, err := c.topicInfo(ctx, nil, topic)
	if err != nil {
		return c.produceOwn(ctx, topic, messages) // it tries again, and says what is wrong
	}
	b, err := encode(info.format, messages)
	if err != nil || len(messages) == 0 {
		return nil, c.failed(topic, b, err)
	}
	size := 0
	for _, p := range b.payloads {
		size += len(p)
	}
	if len(messages) > sharedMessages/4 || size > sharedBytes/4 || b.idempotencyKeys != nil {
		// Locks on idempotency keys, of calls that have nothing to do with each other, are better not held together.
		return c.produceBatch(ctx, topic, b)
	}
	call := &sharedCall{ctx: ctx, batch: b, done: make(chan struct{})}
	s := &c.sharing
	s.mu.Lock()
	if s.topics == nil {
		s.topics = map[string]*shared{}
	}
	t := s.topics[topic]
	if t == nil {
		t = &shared{}
		s.topics[topic] = t
	}
	t.waiting = append(t.waiting, call)
	if !t.active {
		t.active = true
		go c.share(context.WithoutCancel(ctx), topic, t)
	}
	s.mu.Unlock()
	select {
	case <-call.done:
	case <-ctx.Done():
		switch {
		case s.withdraw(t, call):
			return nil, wrap(context.Cause(ctx), "produce to topic %q", topic)
		case call.lone.Load():
			<-call.done // it heeds ctx, and knows better what became of it
			return call.produced, call.err
		}
		return nil, wrap(fmt.Errorf("%w: %w", ErrUnknownOutcome, context.Cause(ctx)), "produce to topic %q", topic)
	}
	if call.alone {
		return c.produceBatch(ctx, topic, b)
	}
	return call.produced, call.err
}

// withdraw takes a call back that is not under way.
func (s *sharing) withdraw(t *shared, call *sharedCall) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, w := range t.waiting {
		if w == call {
			t.waiting = append(t.waiting[:i:i], t.waiting[i+1:]...)
			return true
		}
	}
	return false
}

// share carries out transactions until no call waits. ctx is nobody's: a call that ends does not end the others'.
func (c *Client) share(ctx context.Context, topic string, t *shared) {
	s := &c.sharing
	for {
		// Whoever was answered just now often has the next message at once. It joins those that wait, or half of the callers would
		// always be too late for the other half's transaction: 7,300 messages a second with 16 callers, where this gave 11,000.
		runtime.Gosched()
		s.mu.Lock()
		calls := t.next()
		if len(calls) == 0 {
			delete(s.topics, topic)
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		of := ctx
		if len(calls) == 1 {
			of = calls[0].ctx
		}
		produced, err := c.produceBatch(of, topic, merge(calls))
		for _, call := range calls {
			n := len(call.batch.payloads)
			switch {
			case err == nil:
				call.produced, produced = produced[:n:n], produced[n:]
			case len(calls) > 1 && !errors.Is(err, ErrUnknownOutcome):
				call.alone = true
			default:
				call.err = err
			}
			close(call.done)
		}
	}
}

// next takes the calls of the next transaction. The caller holds mu.
func (t *shared) next() []*sharedCall {
	messages, size, n := 0, 0, 0
	for _, call := range t.waiting {
		for _, p := range call.batch.payloads {
			size += len(p)
		}
		messages += len(call.batch.payloads)
		if n > 0 && (messages > sharedMessages || size > sharedBytes || call.batch.format != t.waiting[0].batch.format) {
			break
		}
		n++
	}
	calls := t.waiting[:n:n]
	if n == 1 {
		calls[0].lone.Store(true)
	}
	t.waiting = t.waiting[n:]
	return calls
}

// merge makes one batch of those of calls.
func merge(calls []*sharedCall) *batch {
	if len(calls) == 1 {
		return calls[0].batch
	}
	n := 0
	for _, call := range calls {
		n += len(call.batch.payloads)
	}
	first := calls[0].batch
	m := &batch{statement: first.statement, format: first.format, payloads: make([][]byte, 0, n)}
	lists := func(b *batch) []*[]*string {
		return []*[]*string{&b.keys, &b.headers, &b.deliverAt, &b.delays, &b.priorities, &b.timeouts}
	}
	into := lists(m)
	for i, list := range into {
		for _, call := range calls {
			if *lists(call.batch)[i] != nil {
				*list = make([]*string, n)
				break
			}
		}
	}
	at := 0
	for _, call := range calls {
		m.payloads = append(m.payloads, call.batch.payloads...)
		for i, list := range lists(call.batch) {
			if *list != nil {
				copy((*into[i])[at:], *list)
			}
		}
		at += len(call.batch.payloads)
	}
	return m
}
