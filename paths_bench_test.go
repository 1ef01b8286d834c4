package weir

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The paths in Go that every message takes, without a server: go test -bench . -run '^$' .
// One operation is one message.

type benchOrder struct {
	Number   int      `json:"number"`
	Customer string   `json:"customer"`
	Lines    []string `json:"lines"`
	Note     string   `json:"note"`
}

func newBenchOrder(n int) benchOrder {
	return benchOrder{
		Number: n, Customer: "c-000042", Lines: []string{"bolt", "nut", "washer", "screw"}, Note: strings.Repeat("handle with care ", 52),
	}
}

// BenchmarkEncode: from a Message to what the server takes.
func BenchmarkEncode(b *testing.B) {
	plain, _ := json.Marshal(newBenchOrder(1))
	for _, size := range []int{1, 250} {
		for name, message := range map[string]Message{
			"struct": {Payload: newBenchOrder(1)},
			"raw":    {Payload: json.RawMessage(plain)},
			"keyed":  {Payload: json.RawMessage(plain), Key: "c-000042", Headers: map[string]string{"source": "shop"}},
		} {
			b.Run(fmt.Sprintf("%s/batch=%d", name, size), func(b *testing.B) {
				messages := make([]Message, size)
				for i := range messages {
					messages[i] = message
				}
				b.ReportAllocs()
				for n := 0; n < b.N; n += size {
					if _, err := encode(JSON, messages); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkMerge: the calls that share a transaction.
func BenchmarkMerge(b *testing.B) {
	const calls = 16
	plain, _ := json.Marshal(newBenchOrder(1))
	var list []*sharedCall
	for range calls {
		one, err := encode(JSON, []Message{{Payload: json.RawMessage(plain), Key: "c-000042"}})
		if err != nil {
			b.Fatal(err)
		}
		list = append(list, &sharedCall{batch: one})
	}
	b.ReportAllocs()
	for n := 0; n < b.N; n += calls {
		merge(list)
	}
}

// benchRun is a run whose client never calls a server.
func benchRun(b *testing.B, mode Mode, handler Handler, o *ConsumerOptions) *run {
	b.Helper()
	pool, err := pgxpool.New(context.Background(), "postgres://nobody@127.0.0.1:1/nowhere")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	c, err := New(pool, &Options{NoListen: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.Close)
	k, err := c.NewConsumer("orders", "billing", handler, o)
	if err != nil {
		b.Fatal(err)
	}
	r := newRun(context.Background(), k)
	r.mode = mode
	b.Cleanup(r.finish)
	return r
}

// BenchmarkDispatch: from claimed messages through queue and handler to the lease's acknowledgement, decoding included.
func BenchmarkDispatch(b *testing.B) {
	const lot = 500
	payload, _ := json.Marshal(newBenchOrder(1))
	raws := make([]*raw, lot)
	for i := range raws {
		raws[i] = &raw{lease: 1}
		raws[i].ID, raws[i].Raw, raws[i].Key = int64(i+1), payload, fmt.Sprintf("c-%06d", i%100)
	}
	one := Handle(func(context.Context, *Received[benchOrder]) error { return nil })
	bytes := Handle(func(context.Context, *Received[[]byte]) error { return nil })
	batch := HandleBatch(func(context.Context, []*Received[[]byte]) error { return nil })
	for _, s := range []struct {
		name    string
		mode    Mode
		handler Handler
		size    int
	}{{"json", Stream, one, 1}, {"bytes", Stream, bytes, 1}, {"ordered", Ordered, bytes, 1}, {"batch=100", Stream, batch, 100}} {
		b.Run(s.name, func(b *testing.B) {
			r := benchRun(b, s.mode, s.handler, &ConsumerOptions{BatchSize: s.size, HandlerTimeout: time.Minute})
			b.ReportAllocs()
			for n := 0; n < b.N; n += lot {
				r.mu.Lock()
				r.held[1] = &lease{id: 1, deadline: time.Now().Add(time.Minute)}
				r.mu.Unlock()
				r.take([]int64{1}, raws)
				for {
					r.mu.Lock()
					left := len(r.queue)
					r.mu.Unlock()
					if left == 0 {
						break
					}
					e, ctx := r.next()
					r.execute(ctx, e)
				}
				if len(r.acks) != 1 {
					b.Fatalf("%d leases are to be acknowledged, want 1", len(r.acks))
				}
				r.acks = r.acks[:0]
			}
		})
	}
}

// BenchmarkSettle: the record of handled messages alone.
func BenchmarkSettle(b *testing.B) {
	const lot = 500
	r := benchRun(b, Stream, Handle(func(context.Context, *Received[[]byte]) error { return nil }), nil)
	raws := make([]*raw, lot)
	for i := range raws {
		raws[i] = &raw{lease: 1}
		raws[i].ID, raws[i].Raw = int64(i+1), []byte("{}")
	}
	errs := make([]error, lot)
	b.ReportAllocs()
	for n := 0; n < b.N; n += lot {
		b.StopTimer()
		r.held[1] = &lease{id: 1, deadline: time.Now().Add(time.Minute)}
		r.take([]int64{1}, raws)
		e := &execution{items: r.queue}
		r.queue = nil
		b.StartTimer()
		r.settle(context.Background(), e, errs)
		r.acks = r.acks[:0]
	}
}
