package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:  "overlap",
		Short: "16 producers whose transactions last 50 ms and always overlap, 8 consumers: delay of delivery",
		Long:  true,
		Run:   overlap,
		Plots: []Plot{{Title: "Delay of delivery", Figures: []string{"p50", "p99", "max"}}},
	})
}

const (
	overlapProducers = 16
	overlapHold      = 50 * time.Millisecond
	overlapPollers   = 8
)

// overlap keeps producers in flight at all times. A fence that replaces its observation with each poll stands still here.
func overlap(ctx context.Context, e *Env) error {
	length := time.Duration(e.Runs(60, 3)) * time.Second
	e.Parameter("producers", overlapProducers)
	e.Parameter("a transaction lasts", overlapHold.String())
	e.Parameter("consumers of the group", overlapPollers)
	e.Parameter("length", length.String())
	lost := 0
	for _, c := range []struct {
		name      string
		unrelated bool
		limit     time.Duration
	}{{"producers alone", false, 200 * time.Millisecond}, {"with an unrelated transaction open", true, 500 * time.Millisecond}} {
		d, err := overlapOnce(ctx, e, length, c.unrelated)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		left := d.left()
		lost += left
		if left > 0 {
			continue
		}
		// A commit that the disk holds up is a long transaction, and what follows it waits for it.
		e.Record("longest producer transaction, "+c.name, "ms", milliseconds(d.longest))
		longest := d.record(e, "overlap", c.name, c.limit)
		e.Target("max, "+c.name, fmt.Sprintf("<= %v", c.limit), longest.String(), longest <= c.limit)
	}
	if lost > 0 {
		e.discard()
	}
	e.Target("never delivered", "= 0", lost, lost == 0)
	return nil
}

func overlapOnce(ctx context.Context, e *Env, length time.Duration, unrelated bool) (*delays, error) {
	client, dsn, err := e.Open(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "busy", nil); err != nil {
		return nil, err
	}
	if err := client.CreateGroup(ctx, "busy", "g", nil); err != nil {
		return nil, err
	}
	if unrelated {
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			return nil, err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		if _, err := conn.Exec(ctx, "begin; select pg_current_xact_id()"); err != nil {
			return nil, err
		}
	}
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = overlapProducers
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	defer pool.Close()

	d := newDelays()
	running, stop := context.WithCancel(ctx)
	defer stop()
	var consumers errgroup.Group
	for range overlapPollers {
		// Without wake-ups, and looking every few milliseconds.
		c, err := e.Connect(ctx, dsn, &weir.Options{NoListen: true})
		if err != nil {
			return nil, err
		}
		k, err := c.NewConsumer("busy", "g", weir.Handle(d.handle), &weir.ConsumerOptions{PollInterval: 10 * time.Millisecond})
		if err != nil {
			return nil, err
		}
		consumers.Go(func() error { return k.Run(running) })
	}
	var (
		producers errgroup.Group
		numbers   atomic.Int64
		deadline  = time.Now().Add(length)
	)
	for i := range overlapProducers {
		producers.Go(func() error {
			time.Sleep(overlapHold * time.Duration(i) / overlapProducers) // spread over the length of one
			for time.Now().Before(deadline) && ctx.Err() == nil {
				n := numbers.Add(1)
				began := time.Now()
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					if _, err := client.ProduceTx(ctx, tx, "busy", weir.Message{Payload: payloadOf(n)}); err != nil {
						return err
					}
					time.Sleep(overlapHold)
					return nil
				})
				if err != nil {
					return err
				}
				d.produced(n, time.Now())
				d.mu.Lock()
				d.longest = max(d.longest, time.Since(began))
				d.mu.Unlock()
			}
			return nil
		})
	}
	err = producers.Wait()
	waitFor(ctx, 10*time.Second, func() bool { return d.left() == 0 })
	stop()
	if e := consumers.Wait(); err == nil {
		err = e
	}
	return d, err
}
