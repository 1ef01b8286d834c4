// Package tracing makes OpenTelemetry spans of what is produced and handled, and carries their context from one to the other in the
// headers of the messages. Names and attributes are those of the semantic conventions for messaging.
//
//	tracing.Produce(ctx, client, "orders", messages...)         // span "send orders"
//	client.NewConsumer("orders", "billing",
//		weir.Handle(tracing.Process(bill)), nil)                // span "process orders"
//
// It uses the tracer provider and the propagator that the program has set: otel.SetTracerProvider, otel.SetTextMapPropagator. Unless a
// propagator is set, nothing is carried.
//
// Whoever produces in SQL, or in another language, gives the message the header that the propagator reads, such as traceparent.
package tracing

import (
	"context"
	"maps"
	"strconv"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/weirhq/weir"
)

// AttemptKey is the attribute that says which attempt at a message a span is, from 1.
const AttemptKey = attribute.Key("messaging.weir.message.attempt")

func tracer() trace.Tracer {
	return otel.Tracer("github.com/weirhq/weir/tracing", trace.WithSchemaURL(semconv.SchemaURL))
}

// Produce is weir.Client.Produce in a span "send <topic>", whose context the messages carry. A message that carries a context
// already keeps it, and the span has a link to that.
func Produce(ctx context.Context, client *weir.Client, topic string, messages ...weir.Message) ([]weir.Produced, error) {
	return send(ctx, topic, messages, func(ctx context.Context, messages []weir.Message) ([]weir.Produced, error) {
		return client.Produce(ctx, topic, messages...)
	})
}

// ProduceTx is weir.Client.ProduceTx in such a span. It ends before the transaction does.
func ProduceTx(ctx context.Context, client *weir.Client, tx pgx.Tx, topic string, messages ...weir.Message) ([]weir.Produced, error) {
	return send(ctx, topic, messages, func(ctx context.Context, messages []weir.Message) ([]weir.Produced, error) {
		return client.ProduceTx(ctx, tx, topic, messages...)
	})
}

// ProduceSQL is weir.Client.ProduceSQL in such a span. It ends before the transaction does.
func ProduceSQL(ctx context.Context, client *weir.Client, tx weir.SQLTx, topic string, messages ...weir.Message) ([]weir.Produced, error) {
	return send(ctx, topic, messages, func(ctx context.Context, messages []weir.Message) ([]weir.Produced, error) {
		return client.ProduceSQL(ctx, tx, topic, messages...)
	})
}

// Inject gives the message with the context of ctx in its headers, unless it carries one already. For weir.Client.Copy, and for
// messages that are stored by other means. The headers of m itself are not changed.
func Inject(ctx context.Context, m weir.Message) weir.Message {
	if carried(m.Headers).IsValid() {
		return m
	}
	headers := maps.Clone(m.Headers)
	if headers == nil {
		headers = map[string]string{}
	}
	otel.GetTextMapPropagator().Inject(ctx, propagation.MapCarrier(headers))
	m.Headers = headers
	return m
}

// carried is the context in a message's headers, not valid where there is none.
func carried(headers map[string]string) trace.SpanContext {
	return trace.SpanContextFromContext(otel.GetTextMapPropagator().Extract(context.Background(), propagation.MapCarrier(headers)))
}

func send(
	ctx context.Context, topic string, messages []weir.Message,
	produce func(ctx context.Context, messages []weir.Message) ([]weir.Produced, error),
) (produced []weir.Produced, err error) {
	var links []trace.Link
	for _, m := range messages {
		if of := carried(m.Headers); of.IsValid() {
			links = append(links, trace.Link{SpanContext: of})
		}
	}
	kind := trace.SpanKindProducer
	if len(messages) > 0 && len(links) == len(messages) {
		kind = trace.SpanKindClient // it is no message's origin
	}
	attributes := []attribute.KeyValue{
		system, semconv.MessagingOperationName("send"), semconv.MessagingOperationTypeSend, semconv.MessagingDestinationName(topic),
	}
	if len(messages) != 1 {
		attributes = append(attributes, semconv.MessagingBatchMessageCount(len(messages)))
	}
	ctx, span := tracer().Start(ctx, "send "+topic, trace.WithSpanKind(kind), trace.WithAttributes(attributes...), trace.WithLinks(links...))
	defer span.End()
	with := make([]weir.Message, len(messages))
	for i, m := range messages {
		with[i] = Inject(ctx, m)
	}
	produced, err = produce(ctx, with)
	if len(produced) == 1 {
		span.SetAttributes(messageID(produced[0].ID))
	}
	note(span, err)
	return produced, err
}

// Process is a handler for weir.Handle that calls handle in a span "process <topic>", one for each attempt. The span is a child of
// that in which the message was sent, so that all that is done about a message is one trace, however much later. It has a link to
// it too, as the conventions demand, and one to the span of ctx where there is one.
//
// A message that cannot be decoded does not reach a handler, and has no span.
func Process[T any](handle func(ctx context.Context, message *weir.Received[T]) error) func(context.Context, *weir.Received[T]) error {
	return func(ctx context.Context, m *weir.Received[T]) error {
		return process(ctx, m, func(ctx context.Context) error { return handle(ctx, m) })
	}
}

// ProcessTx is Process for weir.HandleTx and weir.HandleSQL. The span ends before the transaction does.
func ProcessTx[X, T any](
	handle func(ctx context.Context, tx X, message *weir.Received[T]) error,
) func(context.Context, X, *weir.Received[T]) error {
	return func(ctx context.Context, tx X, m *weir.Received[T]) error {
		return process(ctx, m, func(ctx context.Context) error { return handle(ctx, tx, m) })
	}
}

// ProcessBatch is Process for weir.HandleBatch. One span stands for all messages of the batch, and has a link to the span in which
// each was sent. It is no child of any of them.
func ProcessBatch[T any](handle func(ctx context.Context, messages []*weir.Received[T]) error) func(context.Context, []*weir.Received[T]) error {
	return func(ctx context.Context, messages []*weir.Received[T]) error {
		return processBatch(ctx, messages, func(ctx context.Context) error { return handle(ctx, messages) })
	}
}

// ProcessBatchTx is ProcessBatch for weir.HandleBatchTx and weir.HandleBatchSQL. The span ends before the transaction does.
func ProcessBatchTx[X, T any](
	handle func(ctx context.Context, tx X, messages []*weir.Received[T]) error,
) func(context.Context, X, []*weir.Received[T]) error {
	return func(ctx context.Context, tx X, messages []*weir.Received[T]) error {
		return processBatch(ctx, messages, func(ctx context.Context) error { return handle(ctx, tx, messages) })
	}
}

func process[T any](ctx context.Context, m *weir.Received[T], handle func(ctx context.Context) error) error {
	var links []trace.Link
	ambient := trace.SpanContextFromContext(ctx)
	if of := carried(m.Headers); of.IsValid() {
		links = append(links, trace.Link{SpanContext: of})
		if ambient.IsValid() {
			links = append(links, trace.Link{SpanContext: ambient})
		}
	}
	ctx = otel.GetTextMapPropagator().Extract(ctx, propagation.MapCarrier(m.Headers))
	return in(ctx, m.Topic, m.Group, links, []attribute.KeyValue{messageID(m.ID), AttemptKey.Int(m.Attempt)}, handle)
}

func processBatch[T any](ctx context.Context, messages []*weir.Received[T], handle func(ctx context.Context) error) error {
	var links []trace.Link
	for _, m := range messages {
		if of := carried(m.Headers); of.IsValid() {
			links = append(links, trace.Link{SpanContext: of, Attributes: []attribute.KeyValue{messageID(m.ID), AttemptKey.Int(m.Attempt)}})
		}
	}
	return in(ctx, messages[0].Topic, messages[0].Group, links, []attribute.KeyValue{semconv.MessagingBatchMessageCount(len(messages))}, handle)
}

// in calls handle in a span.
func in(
	ctx context.Context, topic, group string, links []trace.Link, more []attribute.KeyValue, handle func(ctx context.Context) error,
) (err error) {
	ctx, span := tracer().Start(ctx, "process "+topic, trace.WithSpanKind(trace.SpanKindConsumer), trace.WithLinks(links...),
		trace.WithAttributes(system, semconv.MessagingOperationName("process"), semconv.MessagingOperationTypeProcess,
			semconv.MessagingDestinationName(topic), semconv.MessagingConsumerGroupName(group)),
		trace.WithAttributes(more...))
	defer span.End() // by itself: a panic that it meets it records, and lets go on
	returned := false
	defer func() {
		if !returned {
			span.SetStatus(codes.Error, "the handler panicked")
			span.SetAttributes(semconv.ErrorTypeKey.String("panic"))
		}
	}()
	err = handle(ctx)
	returned = true
	note(span, err)
	return err
}

// note gives a span the error that it ended with.
func note(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		span.SetAttributes(semconv.ErrorType(err))
	}
}

var system = semconv.MessagingSystemKey.String("weir")

func messageID(id int64) attribute.KeyValue {
	return semconv.MessagingMessageID(strconv.FormatInt(id, 10))
}
