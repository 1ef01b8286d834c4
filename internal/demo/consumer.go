package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/history"
)

// group is one of the groups that read the topic.
type group struct {
	name      string
	processes bool // read by processes of their own
	batch     int
	how       string
}

var groups = []group{
	{name: "billing", processes: true, how: "one by one, in processes of their own"},
	{name: "search", batch: 100, how: "in batches"},
	{name: "audit", how: "one by one"},
}

// handler puts on record what it begins and what it has finished: a line that is written before the message can be
// acknowledged.
func (g group) handler(rec *history.Recorder, consumer string, work time.Duration) weir.Handler {
	begin := func(m *weir.Received[entry]) {
		rec.HandleStarted(g.name, consumer, m.ID, m.Value.Entry, m.Key, m.Attempt)
	}
	finish := func(ctx context.Context, messages ...*weir.Received[entry]) error {
		pause(ctx, work/2+time.Duration(rand.Int64N(int64(work))))
		for _, m := range messages {
			rec.HandleEnded(g.name, consumer, m.ID, ctx.Err() == nil)
		}
		if err := rec.Err(); err != nil {
			return err // what is not on record is not handled
		}
		return context.Cause(ctx)
	}
	if g.batch > 0 {
		return weir.HandleBatch(func(ctx context.Context, messages []*weir.Received[entry]) error {
			for _, m := range messages {
				begin(m)
			}
			return finish(ctx, messages...)
		})
	}
	return weir.Handle(func(ctx context.Context, m *weir.Received[entry]) error {
		begin(m)
		return finish(ctx, m)
	})
}

// consumer makes the consumer of a group that this process reads. close ends its record.
func (d *demo) consumer(g group, proc int32) (k *weir.Consumer, closeRecord func(), err error) {
	rec := history.Join(d.rec.Base(), proc)
	file, err := os.Create(filepath.Join(d.folder, g.name+".ndjson"))
	if err != nil {
		return nil, nil, err
	}
	rec.Stream(file)
	name := g.name + "-" + d.topic
	o := &weir.ConsumerOptions{Name: name, Lease: d.o.lease(), BatchSize: g.batch, Concurrency: concurrency(d.o.Rate, time.Millisecond)}
	work := time.Millisecond
	if g.batch > 0 {
		o.Concurrency, work = 2, 10*time.Millisecond
	}
	k, err = d.c.NewConsumer(d.topic, g.name, g.handler(rec, name, work), o)
	return k, func() { _ = file.Close() }, err
}

// concurrency is how many handlers keep up with a rate, three times over, when each takes so long.
func concurrency(rate int, each time.Duration) int {
	return min(max(int(3*float64(rate)*each.Seconds()), 2), 500)
}

// role is what a consumer's process is told, on its standard input.
type role struct {
	DSN, Schema, Topic, Group, Folder string
	Base                              int64
	Proc                              int32
	Lease                             time.Duration
	Concurrency                       int
}

// consumerName is that of a process, in leases.
func consumerName(group string, pid int) string { return fmt.Sprintf("%s-%d", group, pid) }

// Consume is a consumer's process: it reads what to do from in, and goes on until in ends, as it does when the process that
// writes to it has died, however it died.
func Consume(ctx context.Context, in io.Reader, log io.Writer) error {
	var r role
	if err := json.NewDecoder(in).Decode(&r); err != nil {
		return fmt.Errorf("read what to consume from the standard input: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
		time.Sleep(10 * time.Second)
		os.Exit(1) // the server may be gone as well, and nobody waits
	}()
	name := consumerName(r.Group, os.Getpid())
	config, err := poolConfig(r.DSN, name, 4)
	if err != nil {
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	c, err := weir.New(pool, &weir.Options{Schema: r.Schema, Logger: logger(log)})
	if err != nil {
		return err
	}
	defer c.Close()
	file, err := os.Create(filepath.Join(r.Folder, name+".ndjson"))
	if err != nil {
		return err
	}
	defer file.Close()
	rec := history.Join(r.Base, r.Proc)
	rec.Stream(file)
	k, err := c.NewConsumer(r.Topic, r.Group, group{name: r.Group}.handler(rec, name, handlerTime),
		&weir.ConsumerOptions{Name: name, Lease: r.Lease, Concurrency: r.Concurrency})
	if err != nil {
		return err
	}
	return k.Run(ctx)
}
