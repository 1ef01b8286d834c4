package weirwatermill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/weirhq/weir"
)

const (
	defaultNackDelay  = 100 * time.Millisecond
	maxNackDelay      = 365 * 24 * time.Hour
	defaultAckTimeout = time.Minute
)

var (
	errNacked   = errors.New("nacked")
	errNotTaken = errors.New("not taken by its subscriber")
)

// SubscriberConfig are the options of a Subscriber. The zero value is ready to use.
type SubscriberConfig struct {
	// GroupOptions are those of a group that is created. Default mode weir.Ordered; the rest as in weir.GroupOptions: it begins
	// with the oldest message that the topic has. A group that exists with another mode is refused with weir.ErrConflict.
	GroupOptions weir.GroupOptions
	// ConsumerOptions are those of each subscription, with the defaults of weir.ConsumerOptions. Concurrency is how many messages
	// are given out and not acknowledged at the most, default 1. HandlerTimeout, default 1 min, counts from when a message is taken
	// from the channel. BatchSize is not used. A Name is completed by the subscription's number within the Subscriber.
	ConsumerOptions weir.ConsumerOptions
	// TopicOptions are those of a topic that is created. Default format weir.Bytes.
	TopicOptions weir.TopicOptions
	// NackDelay is the time after which a nacked message is given out again, up to 365 days. Default 100 ms, negative: none.
	NackDelay time.Duration
	// CountNacks has a Nack count as a failed attempt: the message comes again after the group's RetryDelay, doubled with each
	// attempt, and is dead after the group's MaxAttempts. NackDelay is not used then. Default false: a nacked message comes again
	// until it is acked.
	CountNacks bool
	// NoCreate has topic and group looked up instead of created. Default false: what is missing is created.
	NoCreate bool
	// Logger is told when a subscription ends by itself. Default: slog.Default().
	Logger watermill.LoggerAdapter
}

// Subscriber gives out the messages of topics as one group. Any number of subscribers, in any number of processes, share a group,
// and each message goes to one of them. It is safe for concurrent use by any number of goroutines.
type Subscriber struct {
	client *weir.Client
	group  string
	config SubscriberConfig

	// ctx ends when Close is called.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu            sync.Mutex
	subscriptions int
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// NewSubscriber makes a Subscriber on a client, which it does not close; the client must stay open until Close has returned. It does
// not contact the server. Errors: weir.ErrInvalid.
func NewSubscriber(client *weir.Client, group string, config *SubscriberConfig) (*Subscriber, error) {
	if client == nil {
		return nil, invalid("client", nil, "it must be an open client")
	}
	if group == "" {
		return nil, invalid("group", `""`, "it must have 1 to 200 characters")
	}
	if config == nil {
		config = &SubscriberConfig{}
	}
	s := &Subscriber{client: client, group: group, config: *config}
	c := &s.config
	if c.NackDelay > maxNackDelay {
		return nil, invalid("NackDelay", c.NackDelay, "it must be at most 365 days")
	}
	switch {
	case c.NackDelay == 0:
		c.NackDelay = defaultNackDelay
	case c.NackDelay < 0:
		c.NackDelay = 0
	}
	if c.GroupOptions.Mode == "" {
		c.GroupOptions.Mode = weir.Ordered
	}
	if c.Logger == nil {
		c.Logger = watermill.NewSlogLogger(slog.Default())
	}
	// A consumer that never runs shows whether the options are within their limits.
	if _, err := client.NewConsumer("", group, weir.Handle(func(context.Context, *weir.Received[[]byte]) error { return nil }), &c.ConsumerOptions); err != nil {
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// SubscribeInitialize creates the topic and the group where they are missing, so that the group gets what is published from then on
// before anyone has subscribed. With NoCreate it only looks whether they are there. Errors: ErrClosed, weir.ErrInvalid (a name that
// Weir refuses), weir.ErrConflict (the topic has another format, the group another mode), weir.ErrTopicNotFound,
// weir.ErrGroupNotFound.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	return s.prepare(s.ctx, topic)
}

func (s *Subscriber) prepare(ctx context.Context, topic string) error {
	if s.config.NoCreate {
		if _, err := s.client.Topic(ctx, topic); err != nil {
			return err
		}
		_, err := s.client.Group(ctx, topic, s.group)
		return err
	}
	if err := s.client.CreateTopic(ctx, topic, topicOptions(s.config.TopicOptions)); err != nil {
		return err
	}
	return s.client.CreateGroup(ctx, topic, s.group, &s.config.GroupOptions)
}

// Subscribe gives out the messages of a topic, what SubscribeInitialize does done first. Each call is a consumer of the group of its
// own.
//
// A message that is acked is handled. One that is nacked comes again, to any subscriber of the group, after NackDelay; in an ordered
// group the later messages of its key wait for it. One that is neither within HandlerTimeout is given up: its context ends with
// cause weir.ErrHandlerTimeout, and it comes again after the group's RetryDelay. That is a failed attempt, and after the group's
// MaxAttempts it is dead. A message that nobody takes from the channel waits without limit, and its attempts do not count. One with a
// time limit of its own (weir.Message.Timeout) has that, counted from before it is taken.
//
// A message's context has the values of ctx. It ends when the message is acked, nacked or given up, when its lease is lost (cause
// weir.ErrLeaseLost), or with ctx.
//
// The subscription ends with ctx, with Close, or when going on is pointless: topic or group were dropped, or what else Consumer.Run
// returns an error for, which is logged. It then gives out nothing more, waits for the messages that were taken up to StopTimeout,
// releases what is left to other subscribers, and closes the channel.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if s.ctx.Err() != nil {
		return nil, ErrClosed
	}
	run, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	end := func() { stop(); cancel() }
	if err := s.prepare(run, topic); err != nil {
		end()
		if s.ctx.Err() != nil {
			err = ErrClosed
		}
		return nil, err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		end()
		return nil, ErrClosed
	}
	s.subscriptions++
	o := s.config.ConsumerOptions
	if o.Name != "" {
		o.Name = fmt.Sprintf("%s:%d", o.Name, s.subscriptions)
	}
	sub := &subscription{config: &s.config, ctx: ctx, run: run, out: make(chan *message.Message), timeout: o.HandlerTimeout}
	if sub.timeout == 0 {
		sub.timeout = defaultAckTimeout
	}
	o.HandlerTimeout = -1 // it would count the time until the message is taken
	consumer, err := s.client.NewConsumer(topic, s.group, weir.Handle(sub.handle), &o)
	if err != nil {
		end()
		return nil, err
	}
	s.running.Go(func() {
		defer end()
		err := consumer.Run(run)
		sub.handlers.Wait()
		close(sub.out)
		if err != nil {
			s.config.Logger.Error("subscription ended", err, watermill.LogFields{"topic": topic, "group": s.group})
		}
	})
	return sub.out, nil
}

// Close ends all subscriptions and waits until their channels are closed: for messages that were taken and are neither acked nor
// nacked that is up to StopTimeout, default 10 s. It leaves the client open. It returns nil.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	s.cancel() // under the lock: none is started after it
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

// subscription is one call of Subscribe.
type subscription struct {
	config *SubscriberConfig
	// ctx is the caller's; run ends with it and with Close.
	ctx, run context.Context
	out      chan *message.Message
	// timeout is how long a taken message may stay without Ack and Nack, negative: without limit.
	timeout  time.Duration
	handlers sync.WaitGroup
}

// handle gives one message out and waits for what becomes of it.
func (s *subscription) handle(ctx context.Context, r *weir.Received[[]byte]) error {
	s.handlers.Add(1)
	defer s.handlers.Done()
	of, cancel := context.WithCancelCause(context.WithValue(s.ctx, receivedKey{}, r))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	m := toWatermill(r)
	m.SetContext(of)

	// What is not taken has not been tried.
	if s.run.Err() != nil {
		return weir.RetryIn(0, errNotTaken)
	}
	select {
	case s.out <- m:
	case <-s.run.Done():
		return weir.RetryIn(0, errNotTaken)
	case <-ctx.Done():
		return weir.RetryIn(s.config.NackDelay, errNotTaken)
	}

	var late <-chan time.Time
	if s.timeout > 0 {
		timer := time.NewTimer(s.timeout)
		defer timer.Stop()
		late = timer.C
	}
	var err error
	select {
	case <-m.Acked():
		return nil
	case <-m.Nacked():
		return s.nacked()
	case <-late:
		err = fmt.Errorf("%w: neither acked nor nacked for %v", weir.ErrHandlerTimeout, s.timeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	// Either may have come at the same moment, and says more.
	select {
	case <-m.Acked():
		return nil
	case <-m.Nacked():
		return s.nacked()
	default:
		cancel(err)
		return err
	}
}

func (s *subscription) nacked() error {
	if s.config.CountNacks {
		return errNacked
	}
	return weir.RetryIn(s.config.NackDelay, errNacked)
}
