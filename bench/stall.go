package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:  "stall",
		Short: "delay of delivery while a transaction that has nothing to do with the topic stays open",
		Long:  true,
		Run:   stall,
		Plots: []Plot{{Title: "Delay of delivery", Figures: []string{"p50", "p99", "max"}}},
	})
}

const (
	stallRate  = 200 // messages a second
	stallLimit = time.Second
)

// stall paces messages at one topic while a transaction stays open that would stop every consumer if they waited for the
// oldest transaction of the cluster: four kinds, and none at all for comparison.
func stall(ctx context.Context, e *Env) error {
	open := time.Duration(e.Runs(60, 3)) * time.Second
	e.Parameter("messages a second", stallRate)
	e.Parameter("the transaction stays open", open.String())
	lost := 0
	type kind struct {
		name  string
		begin func(ctx context.Context, dsn string) (end func() error, err error)
	}
	in := func(dsn string, last string, steps ...string) (func() error, error) {
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			return nil, err
		}
		for _, step := range steps {
			if _, err := conn.Exec(ctx, step); err != nil {
				return nil, fmt.Errorf("%s: %w", step, err)
			}
		}
		return func() error {
			defer conn.Close(context.WithoutCancel(ctx))
			_, err := conn.Exec(ctx, last)
			return err
		}, nil
	}
	kinds := []kind{
		{"none", func(context.Context, string) (func() error, error) { return func() error { return nil }, nil }},
		{"same database", func(_ context.Context, dsn string) (func() error, error) {
			return in(dsn, "commit", "create table if not exists public.unrelated (n int)", "begin", "insert into public.unrelated values (1)")
		}},
		{"other database", func(context.Context, string) (func() error, error) {
			other, err := e.Database(ctx)
			if err != nil {
				return nil, err
			}
			return in(other, "commit", "create table public.unrelated (n int)", "begin", "insert into public.unrelated values (1)")
		}},
		{"prepared", func(_ context.Context, dsn string) (func() error, error) {
			return in(dsn, "commit prepared 'unrelated'", "create table if not exists public.unrelated (n int)", "begin",
				"insert into public.unrelated values (1)", "prepare transaction 'unrelated'")
		}},
		{"other topic", func(_ context.Context, dsn string) (func() error, error) {
			return in(dsn, "commit", "select weir.create_topic('other')", "begin", "select weir.produce('other', '1')")
		}},
	}
	for _, k := range kinds {
		d, err := stallOnce(ctx, e, open, k.begin)
		if err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
		left := d.left()
		lost += left
		if left > 0 {
			continue
		}
		longest := d.record(e, "stall", k.name, stallLimit)
		if k.name != "none" {
			e.Target("max, "+k.name, "< 1000 ms", longest.String(), longest < stallLimit)
		}
	}
	if lost > 0 {
		e.discard()
	}
	e.Target("never delivered", "= 0", lost, lost == 0)
	return nil
}

func stallOnce(ctx context.Context, e *Env, open time.Duration, begin func(context.Context, string) (func() error, error)) (*delays, error) {
	client, dsn, err := e.Open(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "paced", nil); err != nil {
		return nil, err
	}
	if err := client.CreateGroup(ctx, "paced", "g", nil); err != nil {
		return nil, err
	}
	d := newDelays()
	consumer, err := client.NewConsumer("paced", "g", weir.Handle(d.handle), nil)
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- consumer.Run(running) }()
	end, err := begin(ctx, dsn)
	if err == nil {
		err = pace(ctx, stallRate, open, func(n int64) error {
			if _, err := client.Produce(ctx, "paced", weir.Message{Payload: payloadOf(n)}); err != nil {
				return err
			}
			d.produced(n, time.Now())
			return nil
		})
		// Delivered while it is open, or it does not count.
		waitFor(ctx, 5*time.Second, func() bool { return d.left() == 0 })
		if e := end(); err == nil {
			err = e
		}
	}
	stop()
	if e := <-done; err == nil {
		err = e
	}
	return d, err
}

// pace calls f at a rate for a while. A call that takes long makes up for it later.
func pace(ctx context.Context, rate int, length time.Duration, f func(n int64) error) error {
	began := time.Now()
	for n := int64(0); ; n++ {
		due := began.Add(time.Duration(n) * time.Second / time.Duration(rate))
		if due.Sub(began) >= length {
			return nil
		}
		if wait := time.Until(due); wait > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(wait):
			}
		}
		if err := f(n); err != nil {
			return err
		}
	}
}
