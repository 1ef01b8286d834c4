package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:  "drain",
		Short: "four producers of 250-message batches at full speed while one group drains: nothing may be skipped",
		Run:   drain,
	})
}

const (
	drainProducers = 4
	drainBatch     = 250
)

// drain counts what was never delivered although the group says that it is done. The producers' transactions overlap all the
// time, so that ids commit out of order: a group that trusts the highest visible id skips some.
func drain(ctx context.Context, e *Env) error {
	batches := e.Runs(100, 20) // of each producer
	e.Parameter("producers", drainProducers)
	e.Parameter("messages a batch", drainBatch)
	e.Parameter("batches a producer", batches)
	payload := drainPayload()
	e.Parameter("payload bytes", len(payload))

	lost, twice := 0, 0
	for i := range e.Runs(5, 1) {
		r, err := drainOnce(ctx, e, batches, payload)
		if err != nil {
			return fmt.Errorf("run %d: %w", i+1, err)
		}
		lost += r.lost
		twice += r.twice
		if lost > 0 {
			break
		}
		e.Logf("drain: run %d: %d messages in %v", i+1, r.messages, r.took.Round(time.Millisecond))
		e.Record("produced", "messages/s", float64(r.messages)/r.produced.Seconds())
		e.Record("drained", "messages/s", float64(r.messages)/r.took.Seconds())
	}
	if lost > 0 {
		e.discard() // the speed of a wrong result is none
	}
	e.Parameter("delivered twice", twice)
	e.Target("never delivered", "= 0", lost, lost == 0)
	return nil
}

type drained struct {
	messages, lost, twice int
	produced              time.Duration // until the last produce returned
	took                  time.Duration // until the last message was handled
}

func drainOnce(ctx context.Context, e *Env, batches int, payload []byte) (drained, error) {
	client, _, err := e.Open(ctx, nil)
	if err != nil {
		return drained{}, err
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "drain", nil); err != nil {
		return drained{}, err
	}
	if err := client.CreateGroup(ctx, "drain", "all", nil); err != nil {
		return drained{}, err
	}

	var (
		mu      sync.Mutex
		handled = map[int64]int{}
		last    atomic.Int64
	)
	began := time.Now()
	consumer, err := client.NewConsumer("drain", "all", weir.HandleBatch(func(_ context.Context, messages []*weir.Received[[]byte]) error {
		mu.Lock()
		defer mu.Unlock()
		for _, m := range messages {
			handled[m.ID]++
		}
		last.Store(int64(time.Since(began)))
		return nil
	}), &weir.ConsumerOptions{BatchSize: 500, Prefetch: 4000})
	if err != nil {
		return drained{}, err
	}
	consuming, stop := context.WithCancel(ctx)
	defer stop()
	consumed := make(chan error, 1)
	go func() { consumed <- consumer.Run(consuming) }()

	var (
		produced []int64
		group    errgroup.Group
	)
	for range drainProducers {
		group.Go(func() error {
			messages := make([]weir.Message, drainBatch)
			for i := range messages {
				messages[i].Payload = payload
			}
			for range batches {
				ids, err := client.Produce(ctx, "drain", messages...)
				if err != nil {
					return err
				}
				mu.Lock()
				produced = append(produced, ids...)
				mu.Unlock()
			}
			return nil
		})
	}
	err = group.Wait()
	producing := time.Since(began)
	if err == nil {
		err = caughtUp(ctx, client, "drain", "all")
	}
	stop()
	if e := <-consumed; err == nil {
		err = e
	}
	if err != nil {
		return drained{}, err
	}
	r := drained{messages: len(produced), produced: producing, took: time.Duration(last.Load())}
	for _, id := range produced {
		switch handled[id] {
		case 0:
			r.lost++
		case 1:
		default:
			r.twice++
		}
	}
	return r, nil
}

// caughtUp waits until a group says that it is done with all there is: it has acknowledged up to the head, and nothing is
// retried. What it has not delivered by then it never will.
func caughtUp(ctx context.Context, c *weir.Client, topic, group string) error {
	progress, committed := time.Now(), int64(-1)
	for {
		g, err := c.Group(ctx, topic, group)
		if err != nil {
			return err
		}
		if g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 {
			return nil
		}
		if g.Committed != committed {
			progress, committed = time.Now(), g.Committed
		}
		if time.Since(progress) > 30*time.Second {
			return fmt.Errorf("group %s stands at %d of %d for 30 s", group, g.Committed, g.Head)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// drainPayload is a JSON object of 1 KB.
func drainPayload() []byte {
	return fmt.Appendf(nil, `{"order":4711,"customer":"c-000042","amount":12.5,"currency":"EUR","note":"%s"}`, strings.Repeat("weir ", 190))
}
