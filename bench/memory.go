package main

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:     "memory",
		Short:    "resident memory of a consumer over 10 million messages, with default settings",
		Settings: compared,
		Long:     true,
		Run:      memory,
	})
}

const (
	memoryParts = 20
	// memoryGrowth is what a heap goes up and down by: the collector lets it double before it does anything.
	memoryGrowth = 1.15
)

// memory has one consumer handle a long log, which is there already, and looks at how much memory this program has all along.
func memory(ctx context.Context, e *Env) error {
	n := e.Runs(10_000_000, 100_000)
	e.Parameter("messages", n)
	client, dsn, err := e.Open(ctx, nil)
	if err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "orders", nil); err != nil {
		return err
	}
	if err := client.CreateGroup(ctx, "orders", "billing", nil); err != nil {
		return err
	}
	if err := fill(ctx, e, dsn, n); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	debug.FreeOSMemory()

	// A bit for each message, from the beginning: what is measured must not grow by itself.
	seen := make([]atomic.Uint64, n/64+1)
	var handled atomic.Int64
	type number struct {
		N int64 `json:"n"`
	}
	handler := weir.HandleBatch(func(_ context.Context, messages []*weir.Received[number]) error {
		for _, m := range messages {
			if seen[m.Value.N/64].Or(1<<(m.Value.N%64))&(1<<(m.Value.N%64)) == 0 {
				handled.Add(1)
			}
		}
		return nil
	})
	consumer, err := client.NewConsumer("orders", "billing", handler, nil)
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	consumed := make(chan error, 1)
	began := time.Now()
	go func() { consumed <- consumer.Run(running) }()

	// Of each part the highest that was seen.
	parts := make([]float64, memoryParts)
	last, progress := int64(0), time.Now()
	for now := handled.Load(); now < int64(n) && time.Since(progress) < 30*time.Second && ctx.Err() == nil; now = handled.Load() {
		resident, err := residentMemory()
		if err != nil {
			return err
		}
		part := int(now * memoryParts / int64(n))
		parts[part] = max(parts[part], resident)
		if now != last {
			last, progress = now, time.Now()
		}
		time.Sleep(5 * time.Millisecond)
	}
	took := time.Since(began)
	stop()
	if err := <-consumed; err != nil {
		return err
	}
	lost := n - int(handled.Load())
	// The first tenth is when it grows to its size.
	first, most := parts[memoryParts/10], 0.0
	for _, p := range parts[memoryParts/2:] {
		most = max(most, p)
	}
	e.Parameter("resident memory at each twentieth, MB", rounded(parts))
	e.Record("handled", "messages/s", float64(n)/took.Seconds())
	e.Record("resident memory after a tenth", "MB", first)
	e.Record("resident memory in the second half", "MB", most)
	e.Record("growth of resident memory", "x", most/first)
	account{"weir": lost}.close(e)
	e.AtMost("growth of resident memory", memoryGrowth)
	return nil
}

// fill stores numbered messages of about 200 bytes, as fast as the server itself can make them.
func fill(ctx context.Context, e *Env, dsn string, n int) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var log string
	if err := conn.QueryRow(ctx, "select 'weir.log_' || id from weir.topic where name = 'orders'").Scan(&log); err != nil {
		return err
	}
	const piece = 100_000
	for from := 0; from < n; from += piece {
		if _, err := conn.Exec(ctx, "select weir.make_room('orders', $1)", piece); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "insert into "+log+` (payload)
			select format('{"n":%s,"pad":%s}', i, to_json($3::text))::json
			from generate_series($1::bigint, $2::bigint) as i`, from, min(from+piece, n)-1, padding); err != nil {
			return err
		}
	}
	return e.Server.Exec(ctx, "postgres", "checkpoint")
}

func rounded(of []float64) []int {
	ints := make([]int, len(of))
	for i, v := range of {
		ints[i] = int(v + 0.5)
	}
	return ints
}
