package main

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:  "ordered",
		Short: "a backlog drained by ordered groups of 1, 16 and 64 shards, against a stream group",
		Run:   ordered,
		Plots: []Plot{{Title: "A backlog drained, by mode of the group", Figures: []string{"drained"}}},
	})
	register(Workload{
		Name:  "retry",
		Short: "10,000 messages that have failed become due at once and are tried again",
		Run:   retry,
	})
}

// backlog stores n messages of about 1 KB with keys, in turn.
func backlog(ctx context.Context, c *weir.Client, topic string, n, keys int) error {
	payload := append(append([]byte(`{"text":"`), bytes.Repeat([]byte("x"), 950)...), `"}`...)
	_, err := c.Copy(ctx, topic, func(yield func(weir.Message, error) bool) {
		for i := range n {
			if !yield(weir.Message{Key: fmt.Sprintf("key %d", i%keys), Payload: payload}, nil) {
				return
			}
		}
	})
	return err
}

// drainGroup consumes a group until n messages are handled, and returns how long that took and in how many messages a key's order was
// not kept.
func drainGroup(ctx context.Context, c *weir.Client, topic, group string, n int) (took time.Duration, disorder int, err error) {
	running, stop := context.WithCancel(ctx)
	defer stop()
	var (
		handled atomic.Int64
		mu      sync.Mutex
		last    = map[string]int64{}
	)
	k, err := c.NewConsumer(topic, group, weir.HandleBatch(func(_ context.Context, messages []*weir.Received[[]byte]) error {
		mu.Lock()
		for _, m := range messages {
			if last[m.Key] > m.ID {
				disorder++
			}
			last[m.Key] = m.ID
		}
		mu.Unlock()
		if handled.Add(int64(len(messages))) >= int64(n) {
			stop()
		}
		return nil
	}), &weir.ConsumerOptions{Concurrency: 4, Prefetch: 4000})
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := k.Run(running); err != nil {
		return 0, 0, err
	}
	if ctx.Err() != nil {
		return 0, 0, context.Cause(ctx)
	}
	return time.Since(began), disorder, nil
}

func ordered(ctx context.Context, e *Env) error {
	const keys = 5000
	messages := e.Runs(200_000, 5_000)
	e.Parameter("messages", messages)
	e.Parameter("keys", keys)
	client, _, err := e.Open(ctx, nil)
	if err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "t", nil); err != nil {
		return err
	}
	if err := backlog(ctx, client, "t", messages, keys); err != nil {
		return err
	}
	disorder := 0
	for run := range e.Runs(5, 1) {
		rate := map[int]float64{}
		for _, shards := range []int{0, 1, 16, 64} {
			o := &weir.GroupOptions{}
			name := "stream"
			if shards > 0 {
				o.Mode, o.Shards, name = weir.Ordered, shards, fmt.Sprintf("%d shards", shards)
			}
			group := fmt.Sprintf("%s %d", name, run)
			if err := client.CreateGroup(ctx, "t", group, o); err != nil {
				return err
			}
			took, d, err := drainGroup(ctx, client, "t", group, messages)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if shards > 0 {
				disorder += d
			}
			rate[shards] = float64(messages) / took.Seconds()
			e.Record("drained, "+name, "messages/s", rate[shards])
			if shards > 0 {
				e.Record("against a stream group, "+name, "x", rate[shards]/rate[0])
			}
		}
	}
	e.Target("messages before an earlier one of their key", "= 0", disorder, disorder == 0)
	return nil
}

func retry(ctx context.Context, e *Env) error {
	const messages = 10_000
	e.Parameter("messages", messages)
	for run := range e.Runs(5, 1) {
		client, dsn, err := e.Open(ctx, nil)
		if err != nil {
			return err
		}
		if err := client.CreateTopic(ctx, "t", nil); err != nil {
			return err
		}
		if err := client.CreateGroup(ctx, "t", "g", &weir.GroupOptions{RetryDelay: time.Hour}); err != nil {
			return err
		}
		if err := backlog(ctx, client, "t", messages, 100); err != nil {
			return err
		}
		failing, stop := context.WithCancel(ctx)
		var failed atomic.Int64
		k, err := client.NewConsumer("t", "g", weir.Handle(func(context.Context, *weir.Received[[]byte]) error {
			failed.Add(1)
			return fmt.Errorf("down")
		}), &weir.ConsumerOptions{Concurrency: 8})
		if err != nil {
			stop()
			return err
		}
		began := time.Now()
		done := make(chan error, 1)
		go func() { done <- k.Run(failing) }()
		for failed.Load() < messages && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		stop()
		if err := <-done; err != nil {
			return err
		}
		e.Record("failures recorded", "messages/s", messages/time.Since(began).Seconds())

		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "update weir.delivery set due_at = clock_timestamp()")
		_ = conn.Close(ctx)
		if err != nil {
			return err
		}
		took, _, err := drainGroup(ctx, client, "t", "g", messages)
		if err != nil {
			return fmt.Errorf("run %d: %w", run, err)
		}
		e.Record("drained", "messages/s", messages/took.Seconds())
		g, err := client.Group(ctx, "t", "g")
		if err != nil {
			return err
		}
		left := int(g.Lag) + g.Retrying + g.Dead + g.Leases
		e.Target("left in the group", "= 0", left, left == 0)
	}
	e.AtLeast("drained", 5_000)
	return nil
}
