package weir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// Handler is what a consumer does with messages. Make one with Handle or HandleBatch.
type Handler struct {
	run   func(ctx context.Context, s *session, messages []*raw) []error
	batch bool
	// pooled: it takes a connection of the client's pool
	pooled bool
}

// raw is a message before its payload is decoded.
type raw struct {
	Received[[]byte]
	lease   int64
	timeout time.Duration
}

// as gives the message with a decoded value.
func (m *raw) as(value []byte) *Received[[]byte] {
	r := m.Received
	r.Value = value
	return &r
}

// Handle makes a Handler that takes one message at a time. The payload is decoded from JSON into T; with T []byte or
// json.RawMessage it is handed over as it is. What cannot be decoded becomes a dead letter at once.
//
// A handler that returns nil has handled the message. After an error, or a panic, the message is tried again later, by any
// consumer of the group, and is dead after the group's MaxAttempts; Dead and RetryIn say otherwise. An error that
// wraps a serialization failure, a deadlock or a lost connection to a database is not held against the message: the
// handler is called again at once, up to three times, and then later.
//
// The context ends when the handler exceeds its time limit (cause ErrHandlerTimeout), when the lease is lost (ErrLeaseLost),
// or when the consumer stops and its StopTimeout has passed (ErrStopped). A message can be handed out more than once:
// a handler's effects must bear that.
func Handle[T any](handle func(ctx context.Context, message *Received[T]) error) Handler {
	return Handler{run: func(ctx context.Context, _ *session, messages []*raw) []error {
		message, err := decode[T](messages[0])
		if err == nil {
			err = handle(ctx, message)
		}
		return []error{err}
	}}
}

// HandleBatch makes a Handler that takes up to ConsumerOptions.BatchSize messages at a time. An error it returns is that of
// each message, unless it is, or wraps, a *BatchError, which names those that failed.
func HandleBatch[T any](handle func(ctx context.Context, messages []*Received[T]) error) Handler {
	return Handler{batch: true, run: func(ctx context.Context, _ *session, messages []*raw) []error {
		errs := make([]error, len(messages))
		decoded := make([]*Received[T], 0, len(messages))
		at := make([]int, 0, len(messages))
		for i, m := range messages {
			message, err := decode[T](m)
			if err != nil {
				errs[i] = err
				continue
			}
			decoded, at = append(decoded, message), append(at, i)
		}
		if len(decoded) == 0 {
			return errs
		}
		err := handle(ctx, decoded)
		var some *BatchError
		for k, i := range at {
			if errors.As(err, &some) {
				errs[i] = some.Failed[k]
			} else {
				errs[i] = err
			}
		}
		return errs
	}}
}

// BatchError is the error of a batch of which some messages were not handled.
type BatchError struct {
	// Failed maps the index of a message in the batch to its error. The others are handled.
	Failed map[int]error
}

// Error counts the failures and shows one.
func (e *BatchError) Error() string {
	for i, err := range e.Failed {
		return fmt.Sprintf("%d messages of the batch failed, message %d: %v", len(e.Failed), i, err)
	}
	return "no message of the batch failed"
}

func decode[T any](m *raw) (*Received[T], error) {
	r := &Received[T]{
		ID: m.ID, Topic: m.Topic, Group: m.Group, Key: m.Key, Headers: m.Headers, Raw: m.Raw,
		ProducedAt: m.ProducedAt, Attempt: m.Attempt, Tombstone: m.Tombstone,
	}
	if m.Tombstone {
		return r, nil
	}
	switch v := any(&r.Value).(type) {
	case *[]byte:
		*v = m.Raw
	case *json.RawMessage:
		*v = m.Raw
	default:
		if err := json.Unmarshal(m.Raw, &r.Value); err != nil {
			return nil, Dead(fmt.Errorf("decode payload: %w", err))
		}
	}
	return r, nil
}

// Dead marks an error of a handler: the message is a dead letter now, without further attempts.
func Dead(err error) error { return &verdict{err: err, dead: true} }

// RetryIn marks an error of a handler: the message is tried again after d (at most 365 days), and this attempt does not count.
func RetryIn(d time.Duration, err error) error { return &verdict{err: err, after: d} }

// RetryAfter marks an error of a handler: the message is tried again after d (at most 365 days) instead of the group's RetryDelay.
// The attempt counts: after the group's MaxAttempts the message is dead.
func RetryAfter(d time.Duration, err error) error { return &verdict{err: err, after: d, counts: true} }

type verdict struct {
	err    error
	dead   bool
	counts bool
	after  time.Duration
}

func (v *verdict) Error() string {
	if v.err == nil {
		return "no reason given"
	}
	return v.err.Error()
}
func (v *verdict) Unwrap() error { return v.err }

// panicError is what a handler panicked with.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.value, e.stack) }

// call runs a handler and turns a panic into the error of each message.
func (h Handler) call(ctx context.Context, s *session, messages []*raw) (errs []error) {
	defer func() {
		if v := recover(); v != nil {
			errs = make([]error, len(messages))
			for i := range errs {
				errs[i] = &panicError{v, debug.Stack()}
			}
		}
	}()
	return h.run(ctx, s, messages)
}
