package weir

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"
)

// ConsumerOptions are the options of a Consumer. The zero value is ready to use.
type ConsumerOptions struct {
	// Concurrency is how many handlers run at once, 1 to 10,000. Default 1: messages are handled in id order, but for
	// those that are tried again.
	Concurrency int
	// BatchSize is how many messages a HandleBatch handler gets at the most, 1 to 10,000. Default 100.
	BatchSize int
	// Prefetch is how many messages are claimed ahead at the most, those being handled included, 1 to 100,000. Default: the
	// larger of 200 and twice what all handlers take; of a queue group, what all handlers take. PrefetchBytes is the same in bytes of payload, default 16 MiB; a
	// single larger message is taken alone.
	Prefetch      int
	PrefetchBytes int64
	// Lease is how long claimed messages stay this consumer's without a sign of life, 100 ms to 1 day. Default 15 s. It is
	// renewed at a third of it while the process lives; when the process dies, others take its messages over after that.
	Lease time.Duration
	// HandlerTimeout is how long a handler may take, unless the message says (Message.Timeout) and is handled by itself. Default
	// 1 min, negative: without limit. After it the handler's context
	// ends and the message is retried; a handler that ignores its context loses its place to another a second later.
	HandlerTimeout time.Duration
	// StopTimeout is how long running handlers may finish after Run's context has ended. Default 10 s, negative: without
	// limit. After it their contexts end, and what is not finished a second later is released to other consumers.
	StopTimeout time.Duration
	// PollInterval is the longest time between two looks for messages, 10 ms to 1 min. Default 1 s. Wake-ups, and the
	// poll's own shorter steps after activity, come before it.
	PollInterval time.Duration
	// BlockedAfter is how long messages may wait for an open transaction that produced before them until the consumer logs a
	// warning that names it, and again each minute. Default 10 s, negative: never.
	BlockedAfter time.Duration
	// Name identifies the consumer in leases. Default: host, process id and a random part. It must be unique to this run.
	Name string
}

func (o ConsumerOptions) complete(batch bool) (ConsumerOptions, error) {
	ints := []struct {
		field    string
		value    *int
		fallback int
		high     int
	}{
		{"Concurrency", &o.Concurrency, 1, 10_000},
		{"BatchSize", &o.BatchSize, 100, 10_000},
		{"Prefetch", &o.Prefetch, 0, 100_000},
	}
	for _, f := range ints {
		if *f.value == 0 {
			*f.value = f.fallback
		}
		if *f.value < 0 || *f.value > f.high {
			return o, invalid(f.field, *f.value, fmt.Sprintf("it must be from 1 to %d, or 0 for the default", f.high))
		}
	}
	if !batch {
		o.BatchSize = 1
	}
	if o.Prefetch == 0 {
		o.Prefetch = min(max(200, 2*o.Concurrency*o.BatchSize), 100_000)
	}
	durations := []struct {
		field     string
		value     *time.Duration
		fallback  time.Duration
		low, high time.Duration
		off       bool
	}{
		{"Lease", &o.Lease, 15 * time.Second, 100 * time.Millisecond, 24 * time.Hour, false},
		{"HandlerTimeout", &o.HandlerTimeout, time.Minute, time.Millisecond, 1 << 62, true},
		{"StopTimeout", &o.StopTimeout, 10 * time.Second, time.Millisecond, 1 << 62, true},
		{"BlockedAfter", &o.BlockedAfter, 10 * time.Second, time.Millisecond, 1 << 62, true},
		{"PollInterval", &o.PollInterval, time.Second, 10 * time.Millisecond, time.Minute, false},
	}
	for _, f := range durations {
		if *f.value == 0 {
			*f.value = f.fallback
		}
		if f.off && *f.value < 0 {
			*f.value = -1
			continue
		}
		if *f.value < f.low || *f.value > f.high {
			return o, invalid(f.field, *f.value, fmt.Sprintf("it must be from %v to %v, or 0 for the default", f.low, f.high))
		}
	}
	if o.PrefetchBytes == 0 {
		o.PrefetchBytes = 16 << 20
	}
	if o.PrefetchBytes < 0 {
		return o, invalid("PrefetchBytes", o.PrefetchBytes, "it must be at least 1, or 0 for the default")
	}
	if o.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "unknown"
		}
		id := make([]byte, 6)
		_, _ = rand.Read(id) // never fails
		o.Name = fmt.Sprintf("%s:%d:%s", host, os.Getpid(), hex.EncodeToString(id))
	}
	if utf8.RuneCountInString(o.Name) > 200 || !utf8.ValidString(o.Name) || strings.ContainsFunc(o.Name, unicode.IsControl) {
		return o, invalid("Name", fmt.Sprintf("%q", o.Name), "it must have at most 200 characters, valid UTF-8 and no control characters")
	}
	return o, nil
}

// Consumer hands the messages of a group to a handler. Any number of consumers, in any number of processes, share a group.
type Consumer struct {
	c            *Client
	topic, group string
	handler      Handler
	o            ConsumerOptions
	// prefetchDefault: Prefetch was not given
	prefetchDefault bool

	running atomic.Bool
	stats   struct {
		handled, failed, lost, buffered, executing, hung atomic.Int64
	}
}

// ConsumerStats are the figures of a Consumer at one moment.
type ConsumerStats struct {
	// Handled messages, Failed attempts and Lost leases are counted since the consumer was made.
	Handled, Failed, Lost int64
	// Buffered is how many messages are claimed and not finished, Executing how many handlers run, Hung how many of them
	// have ignored the end of their context and lost their place.
	Buffered, Executing, Hung int64
}

// NewConsumer makes a consumer; Run starts it. Errors: ErrInvalid.
func (c *Client) NewConsumer(topic, group string, handler Handler, o *ConsumerOptions) (*Consumer, error) {
	if handler.run == nil {
		return nil, invalid("handler", "empty", "make one with Handle or HandleBatch")
	}
	if o == nil {
		o = &ConsumerOptions{}
	}
	complete, err := o.complete(handler.batch)
	if err != nil {
		return nil, err
	}
	if handler.pooled && c.pool.Config().MaxConns < 2 {
		return nil, invalid("pool_max_conns", 1, "a handler with a transaction needs a pool of at least 2 connections: one renews leases meanwhile")
	}
	return &Consumer{
		c: c, topic: topic, group: group, handler: handler, o: complete, prefetchDefault: o.Prefetch == 0,
	}, nil
}

// Name is what identifies the consumer in leases.
func (k *Consumer) Name() string { return k.o.Name }

// Stats returns the consumer's figures.
func (k *Consumer) Stats() ConsumerStats {
	s := &k.stats
	return ConsumerStats{
		Handled: s.handled.Load(), Failed: s.failed.Load(), Lost: s.lost.Load(),
		Buffered: s.buffered.Load(), Executing: s.executing.Load(), Hung: s.hung.Load(),
	}
}

// Run claims and handles messages until ctx ends; then it claims no more, lets running handlers finish (StopTimeout),
// acknowledges what they did, releases the rest, and returns nil.
//
// It goes on by itself after a lost connection or a restart of the server. It returns an error when going on is pointless:
// ErrTopicNotFound, ErrGroupNotFound, ErrSchemaMissing, ErrSchemaOld, ErrSchemaNew, ErrInvalid, or a privilege that is
// missing. A standby or a broken sequence is logged and waited for.
func (k *Consumer) Run(ctx context.Context) error {
	if !k.running.CompareAndSwap(false, true) {
		return errors.New("this consumer is running already: make another one")
	}
	defer k.running.Store(false)
	return newRun(ctx, k).serve(ctx)
}
