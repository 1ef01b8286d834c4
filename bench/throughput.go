package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// compared are the settings of servers on which systems are compared: enough memory, and no checkpoint that falls into the turn of
// one of them (each turn begins with one).
var compared = map[string]string{
	"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h",
}

func init() {
	register(Workload{
		Name:     "throughput",
		Short:    "4 producers of 250-message batches at full speed, marshalled and unmarshalled, while one group drains",
		Settings: compared,
		Peers:    []string{"floor", "pgq", "watermill", "river", "nats", "nats-always"},
		Run:      throughput,
		Plots: []Plot{
			{Title: "Throughput", Figures: []string{"consumed", "produced"}},
			{Title: "From the produce call to the handler", Figures: []string{"p50", "p99"}, Log: true},
		},
	})
	register(Workload{
		Name:     "wal",
		Short:    "bytes of write-ahead log per message, from the produce to the acknowledgement",
		Settings: compared,
		Peers:    []string{"floor", "pgq", "watermill", "river"},
		Run:      wal,
		Plots:    []Plot{{Title: "Write-ahead log", Figures: []string{"WAL"}}},
	})
}

const (
	producers = 4
	batchSize = 250
)

// throughputLimit ends the producers of a system that is so slow that its share would take minutes.
const throughputLimit = 12 * time.Second

// poured is what a turn of pour found.
type poured struct {
	tally    *tally
	produced time.Duration // until the last produce returned
	wal      float64       // bytes of write-ahead log per message
}

// pour has four producers store batches, of 250 messages each, while one group drains.
func pour(ctx context.Context, e *Env, p Peer, batches int) (poured, error) {
	var r poured
	err := e.turn(ctx, p, Shape{Callers: producers}, func(s System) error {
		before, err := e.walPosition(ctx)
		if err != nil {
			return err
		}
		t := newTally(producers * batches * batchSize)
		r.tally = t
		err = consuming(ctx, s, t, func() error {
			var group errgroup.Group
			for range producers {
				group.Go(func() error {
					for range batches {
						if time.Since(t.began) > throughputLimit {
							break
						}
						orders := t.orders(batchSize)
						if err := s.Produce(ctx, orders); err != nil {
							return err
						}
						t.produced.Add(int64(len(orders)))
					}
					return nil
				})
			}
			if err := group.Wait(); err != nil {
				return err
			}
			r.produced = time.Since(t.began)
			t.drained(ctx, p.patience())
			return ctx.Err()
		})
		if err != nil {
			return err
		}
		after, err := e.walPosition(ctx)
		r.wal = float64(after-before) / float64(t.produced.Load())
		return err
	})
	return r, err
}

// walPosition is how many bytes of write-ahead log the server has written.
func (e *Env) walPosition(ctx context.Context) (position int64, err error) {
	conn, err := pgx.Connect(ctx, e.Server.DSN("postgres"))
	if err != nil {
		return 0, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, "select (pg_current_wal_insert_lsn() - '0/0')::bigint").Scan(&position)
	return position, err
}

func throughput(ctx context.Context, e *Env) error {
	all, err := e.peers(ctx)
	if err != nil {
		return err
	}
	batches := e.Runs(200, 5)
	e.Parameter("producers", producers)
	e.Parameter("messages a batch", batchSize)
	e.Parameter("bytes a message", orderBytes())
	e.Parameter("batches a producer", batches)
	e.Parameter("producers stop after", throughputLimit.String())
	lost := account{}
	figures := []measured{
		{"consumed", "messages/s", true},
		{"produced", "messages/s", false},
		{"p50", "ms", true},
		{"p99", "ms", false},
		{"WAL", "bytes/message", false},
	}
	err = e.rounds(e.Runs(5, 1), all, figures, func(p Peer) (map[string]float64, error) {
		r, err := pour(ctx, e, p, batches)
		if err != nil || !lost.sound(e, p, r.tally) {
			return nil, err
		}
		delays := r.tally.delays(0)
		return map[string]float64{
			"consumed": float64(r.tally.delivered.Load()) / time.Duration(r.tally.last.Load()).Seconds(),
			"produced": float64(r.tally.produced.Load()) / r.produced.Seconds(),
			"p50":      milliseconds(quantile(delays, 0.5)),
			"p99":      milliseconds(quantile(delays, 0.99)),
			"WAL":      r.wal,
		}, nil
	})
	if err != nil {
		return err
	}
	lost.close(e)
	e.AtLeast("consumed against floor", 0.9)
	e.AtLeast("consumed against pgq", 1.1)
	e.AtMost("p50 against pgq", 0.2)
	e.AtLeast("consumed against watermill", 1.3)
	e.AtLeast("consumed against river", 2.5)
	e.AtLeast("consumed against nats", 1)
	return nil
}

func wal(ctx context.Context, e *Env) error {
	all, err := e.peers(ctx)
	if err != nil {
		return err
	}
	batches := e.Runs(50, 5)
	e.Parameter("messages", producers*batches*batchSize)
	lost := account{}
	err = e.rounds(e.Runs(3, 1), all, []measured{{"WAL", "bytes/message", true}}, func(p Peer) (map[string]float64, error) {
		r, err := pour(ctx, e, p, batches)
		if err != nil || !lost.sound(e, p, r.tally) {
			return nil, err
		}
		return map[string]float64{"WAL": r.wal}, nil
	})
	if err != nil {
		return err
	}
	lost.close(e)
	e.AtMost("WAL against floor", 1.1)
	return nil
}
