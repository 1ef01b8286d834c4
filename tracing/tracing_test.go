package tracing_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/tracing"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// world is a client on a database with the topic "orders" and its group "billing", and the spans that end. The tests of this package
// do not run side by side: provider and propagator are the process's.
type world struct {
	*testing.T
	client *weir.Client
	pool   *pgxpool.Pool
	spans  *tracetest.SpanRecorder
	tracer trace.Tracer
}

func newWorld(t *testing.T) *world {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(spans))
	wasProvider, wasPropagator := otel.GetTracerProvider(), otel.GetTextMapPropagator()
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	t.Cleanup(func() {
		otel.SetTracerProvider(wasProvider)
		otel.SetTextMapPropagator(wasPropagator)
	})
	pool, err := pgxpool.New(t.Context(), pgtest.Shared(t).Database(t))
	noError(t, err)
	t.Cleanup(pool.Close)
	c, err := weir.New(pool, &weir.Options{NoMaintenance: true, Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	t.Cleanup(c.Close)
	noError(t, c.Migrate(t.Context()))
	noError(t, c.CreateTopic(t.Context(), "orders", nil))
	noError(t, c.CreateGroup(t.Context(), "orders", "billing", &weir.GroupOptions{MaxAttempts: 2, RetryDelay: -1}))
	return &world{t, c, pool, spans, provider.Tracer("test")}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ended waits for n spans of that name.
func (w *world) ended(name string, n int) []sdk.ReadOnlySpan {
	w.Helper()
	var found []sdk.ReadOnlySpan
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		found = found[:0]
		for _, s := range w.spans.Ended() {
			if s.Name() == name {
				found = append(found, s)
			}
		}
		if len(found) == n {
			return found
		}
		if time.Since(began) > 20*time.Second {
			w.Fatalf("%d spans %q have ended, want %d", len(found), name, n)
		}
	}
}

// consume runs a consumer to the test's end.
func (w *world) consume(ctx context.Context, h weir.Handler) {
	w.Helper()
	k, err := w.client.NewConsumer("orders", "billing", h, nil)
	noError(w.T, err)
	ctx, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	w.Cleanup(func() {
		stop()
		noError(w.T, <-done)
	})
}

// is compares kind and attributes of a span.
func (w *world) is(s sdk.ReadOnlySpan, kind trace.SpanKind, want map[string]any) {
	w.Helper()
	if s.SpanKind() != kind {
		w.Errorf("%s is of kind %v, want %v", s.Name(), s.SpanKind(), kind)
	}
	got := map[string]any{}
	for _, a := range s.Attributes() {
		got[string(a.Key)] = a.Value.AsInterface()
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.Errorf("%s has the attributes\n%v, want\n%v", s.Name(), got, want)
	}
}

// linked are the spans that a span has links to.
func linked(s sdk.ReadOnlySpan) (ids []trace.SpanID) {
	for _, l := range s.Links() {
		ids = append(ids, l.SpanContext.SpanID())
	}
	return ids
}

func sent(more map[string]any) map[string]any {
	all := map[string]any{
		"messaging.system": "weir", "messaging.operation.name": "send", "messaging.operation.type": "send", "messaging.destination.name": "orders",
	}
	for k, v := range more {
		all[k] = v
	}
	return all
}

func handled(more map[string]any) map[string]any {
	all := map[string]any{
		"messaging.system": "weir", "messaging.operation.name": "process", "messaging.operation.type": "process",
		"messaging.destination.name": "orders", "messaging.consumer.group.name": "billing",
	}
	for k, v := range more {
		all[k] = v
	}
	return all
}

// TestOneTrace: request, send, each attempt and what the handler does are one trace; baggage arrives.
func TestOneTrace(t *testing.T) {
	w := newWorld(t)
	member, err := baggage.NewMember("tenant", "acme")
	noError(t, err)
	bag, err := baggage.New(member)
	noError(t, err)
	ctx, request := w.tracer.Start(baggage.ContextWithBaggage(t.Context(), bag), "request")
	headers := map[string]string{"own": "1"}
	produced, err := tracing.Produce(ctx, w.client, "orders", weir.Message{Payload: 7, Headers: headers})
	request.End()
	noError(t, err)
	if len(headers) != 1 || len(produced) != 1 || produced[0].ID != 1 {
		t.Errorf("produced %v, the caller's headers are %v", produced, headers)
	}
	runs, running := w.tracer.Start(t.Context(), "run")
	defer running.End()
	w.consume(runs, weir.Handle(tracing.Process(func(ctx context.Context, m *weir.Received[int]) error {
		_, inner := w.tracer.Start(ctx, "inner")
		inner.End()
		if m.Value != 7 || m.Headers["own"] != "1" || baggage.FromContext(ctx).Member("tenant").Value() != "acme" {
			t.Errorf("got %+v with baggage %v", m, baggage.FromContext(ctx))
		}
		if m.Attempt == 1 {
			return errors.New("the till is jammed")
		}
		return nil
	})))
	send := w.ended("send orders", 1)[0]
	w.is(send, trace.SpanKindProducer, sent(map[string]any{"messaging.message.id": "1"}))
	if send.Parent().SpanID() != request.SpanContext().SpanID() || len(send.Links()) != 0 || send.Status().Code != codes.Unset {
		t.Errorf("the sending span: parent %v, links %v, status %v", send.Parent(), send.Links(), send.Status())
	}
	attempts, inner := w.ended("process orders", 2), w.ended("inner", 2)
	for i, s := range attempts {
		want := map[string]any{"messaging.message.id": "1", "messaging.weir.message.attempt": i + 1}
		status := sdk.Status{}
		if i == 0 {
			want["error.type"] = "*errors.errorString"
			status = sdk.Status{Code: codes.Error, Description: "the till is jammed"}
		}
		w.is(s, trace.SpanKindConsumer, handled(want))
		if s.Status() != status {
			t.Errorf("attempt %d has the status %v, want %v", i+1, s.Status(), status)
		}
		if s.SpanContext().TraceID() != request.SpanContext().TraceID() || s.Parent().SpanID() != send.SpanContext().SpanID() || !s.Parent().IsRemote() {
			t.Errorf("attempt %d has the parent %v", i+1, s.Parent())
		}
		if want := []trace.SpanID{send.SpanContext().SpanID(), running.SpanContext().SpanID()}; !slices.Equal(linked(s), want) {
			t.Errorf("attempt %d has links to %v, want %v", i+1, linked(s), want)
		}
		if inner[i].Parent().SpanID() != s.SpanContext().SpanID() {
			t.Errorf("the handler's span has the parent %v", inner[i].Parent())
		}
		if scope := s.InstrumentationScope(); scope.Name != "github.com/weirhq/weir/tracing" || scope.SchemaURL == "" {
			t.Errorf("the scope is %+v", scope)
		}
	}
}

// TestBatch: one span for a batch, with links to what sent each message; messages that bring a context keep it.
func TestBatch(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, origin := w.tracer.Start(ctx, "origin")
	carried := tracing.Inject(trace.ContextWithSpan(ctx, origin), weir.Message{Payload: 2})
	if again := tracing.Inject(ctx, carried); again.Headers["traceparent"] != carried.Headers["traceparent"] || carried.Headers["traceparent"] == "" {
		t.Errorf("a context was replaced: %v, %v", carried.Headers, again.Headers)
	}
	_, err := tracing.Produce(ctx, w.client, "orders", weir.Message{Payload: 1}, carried)
	noError(t, err)
	_, err = tracing.Produce(ctx, w.client, "orders", carried)
	noError(t, err)
	_, err = w.client.Produce(ctx, "orders", weir.Message{Payload: 4})
	noError(t, err)
	sends := w.ended("send orders", 2)
	w.is(sends[0], trace.SpanKindProducer, sent(map[string]any{"messaging.batch.message_count": 2}))
	w.is(sends[1], trace.SpanKindClient, sent(map[string]any{"messaging.message.id": "3"}))
	for _, s := range sends {
		if want := []trace.SpanID{origin.SpanContext().SpanID()}; !slices.Equal(linked(s), want) {
			t.Errorf("a sending span has links to %v, want %v", linked(s), want)
		}
	}

	w.consume(ctx, weir.HandleBatch(tracing.ProcessBatch(func(_ context.Context, messages []*weir.Received[int]) error {
		if len(messages) != 4 {
			t.Errorf("a batch of %d", len(messages))
		}
		return nil
	})))
	s := w.ended("process orders", 1)[0]
	w.is(s, trace.SpanKindConsumer, handled(map[string]any{"messaging.batch.message_count": 4}))
	want := []trace.SpanID{sends[0].SpanContext().SpanID(), origin.SpanContext().SpanID(), origin.SpanContext().SpanID()}
	if s.Parent().IsValid() || !slices.Equal(linked(s), want) {
		t.Errorf("the batch has the parent %v and links to %v, want %v", s.Parent(), linked(s), want)
	}
	for i, l := range s.Links() {
		if want := fmt.Sprint(map[attribute.Key]any{"messaging.message.id": i + 1, "messaging.weir.message.attempt": 1}); fmt.Sprint(attributes(l)) != want {
			t.Errorf("link %d has %v, want %v", i, attributes(l), want)
		}
	}
}

func attributes(l sdk.Link) map[attribute.Key]any {
	of := map[attribute.Key]any{}
	for _, a := range l.Attributes {
		of[a.Key] = a.Value.AsInterface()
	}
	return of
}

// TestTransactions: producing and handling in transactions of pgx and of database/sql, by one and in batches.
func TestTransactions(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	db := stdlib.OpenDBFromPool(w.pool)
	t.Cleanup(func() { _ = db.Close() })
	noError(t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		_, err := tracing.ProduceTx(ctx, w.client, tx, "orders", weir.Message{Payload: 1})
		return err
	}))
	tx, err := db.BeginTx(ctx, nil)
	noError(t, err)
	_, err = tracing.ProduceSQL(ctx, w.client, tx, "orders", weir.Message{Payload: 2})
	noError(t, err)
	noError(t, tx.Commit())
	w.client.Wake("orders")
	sends := w.ended("send orders", 2)
	for name, h := range map[string]weir.Handler{
		"tx":       weir.HandleTx(tracing.ProcessTx(func(context.Context, pgx.Tx, *weir.Received[int]) error { return nil })),
		"sql":      weir.HandleSQL(db, tracing.ProcessTx(func(context.Context, *sql.Tx, *weir.Received[int]) error { return nil })),
		"batch tx": weir.HandleBatchTx(tracing.ProcessBatchTx(func(context.Context, pgx.Tx, []*weir.Received[int]) error { return nil })),
		"batch sql": weir.HandleBatchSQL(db, tracing.ProcessBatchTx(
			func(context.Context, *sql.Tx, []*weir.Received[int]) error { return nil })),
	} {
		noError(t, w.client.CreateGroup(ctx, "orders", name, nil))
		k, err := w.client.NewConsumer("orders", name, h, nil)
		noError(t, err)
		run, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- k.Run(run) }()
		for began := time.Now(); k.Stats().Handled < 2; time.Sleep(5 * time.Millisecond) {
			if time.Since(began) > 20*time.Second {
				t.Fatalf("%s: %+v", name, k.Stats())
			}
		}
		stop()
		noError(t, <-done)
		links := map[trace.SpanID]bool{}
		for _, s := range w.spans.Ended() {
			if slices.Contains(s.Attributes(), attribute.String("messaging.consumer.group.name", name)) {
				for _, id := range linked(s) {
					links[id] = true
				}
			}
		}
		if len(links) != 2 || !links[sends[0].SpanContext().SpanID()] || !links[sends[1].SpanContext().SpanID()] {
			t.Errorf("%s: links to %v", name, links)
		}
	}
}

// TestErrors: what fails says so; a panic is recorded and goes on to the library; without a propagator nothing is carried.
func TestErrors(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, err := tracing.Produce(ctx, w.client, "nowhere", weir.Message{Payload: 1})
	if !errors.Is(err, weir.ErrTopicNotFound) {
		t.Errorf("the error is %v", err)
	}
	if s := w.ended("send nowhere", 1)[0]; s.Status().Code != codes.Error || s.Status().Description != err.Error() {
		t.Errorf("the span has the status %v", s.Status())
	}
	if got, err := tracing.Produce(ctx, w.client, "orders"); len(got) != 0 || err != nil {
		t.Errorf("no messages: %v, %v", got, err)
	}

	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator())
	_, err = tracing.Produce(ctx, w.client, "orders", weir.Message{Payload: 1})
	noError(t, err)
	w.consume(ctx, weir.Handle(tracing.Process(func(_ context.Context, m *weir.Received[int]) error {
		if m.Headers != nil {
			t.Errorf("the headers are %v", m.Headers)
		}
		panic("the till exploded")
	})))
	for _, s := range w.ended("process orders", 2) {
		if s.Parent().IsValid() || len(s.Links()) != 0 || s.Status().Code != codes.Error || len(s.Events()) != 1 ||
			!slices.Contains(s.Attributes(), attribute.String("error.type", "panic")) {
			t.Errorf("parent %v, links %v, status %v, events %v, attributes %v", s.Parent(), s.Links(), s.Status(), s.Events(), s.Attributes())
		}
	}
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		g, err := w.client.Group(ctx, "orders", "billing")
		noError(t, err)
		if g.Dead == 1 {
			break
		}
		if time.Since(began) > 20*time.Second {
			t.Fatalf("the message is not dead: %+v", g)
		}
	}
}

// Spans of what is produced and of what handles it, in one trace.
func Example() {
	otel.SetTracerProvider(sdk.NewTracerProvider()) // with an exporter
	otel.SetTextMapPropagator(propagation.TraceContext{})

	ctx := context.Background()
	client, err := weir.Open(ctx, "", nil)
	if err != nil {
		return
	}
	defer client.Close()
	_, _ = tracing.Produce(ctx, client, "orders", weir.Message{Payload: "an order"})
	bill := func(context.Context, *weir.Received[string]) error { return nil }
	consumer, err := client.NewConsumer("orders", "billing", weir.Handle(tracing.Process(bill)), nil)
	if err != nil {
		return
	}
	_ = consumer.Run(ctx)
}
