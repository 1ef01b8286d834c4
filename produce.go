package weir

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// MaxPayload is the largest payload of one message, in bytes.
	MaxPayload = 128 << 20
	// maxBatch is what one statement carries at the most; the server takes less than 1 GB.
	maxBatch = 256 << 20
	// copyChunk is how many messages one COPY stores at the most: the log has room made for so many before it begins.
	copyChunk = 10_000
)

// Limits of a message.
const (
	maxKey            = 1024 // bytes
	maxPriority       = 10
	maxTimeout        = 7 * 24 * time.Hour
	maxDelay          = 3650 * 24 * time.Hour
	maxIdempotencyKey = 200 // characters
)

// Message is a message to produce. One that is out of its limits is refused with an error that names its place among those of
// the call, from 0, and the field: ErrFormat or ErrInvalid.
type Message struct {
	// Key is what the message is about; "" for none. Valid UTF-8 without NUL, at most 1,024 bytes.
	Key string
	// Headers go with the message. Valid UTF-8 without NUL. The server keeps them as jsonb.
	Headers map[string]string
	// Payload is stored as it is when it is a []byte or json.RawMessage; on a bytes topic a string too. Anything else is
	// marshalled as JSON. At most MaxPayload bytes.
	Payload any
	// Tombstone says that the key is gone, in a compacted topic: the message has no payload, and is removed itself after
	// TopicOptions.TombstoneTTL. Payload must be nil.
	Tombstone bool
	// DeliverAt is when the message is handed out, to the microsecond, before the year 10000; at once when that is past.
	// Delay is the same as a length of time after it is stored, by the server's clock, up to 3,650 days. Not both. Default: at
	// once.
	DeliverAt time.Time
	Delay     time.Duration
	// Priority is -10 to 10, default 0. A queue group hands out higher ones first; others do not look at it.
	Priority int
	// Timeout is how long a handler may take for this message at the most, 1 ms to 7 days. Default: the consumer's own limit.
	Timeout time.Duration
	// IdempotencyKey is remembered by the topic for its TopicOptions.IdempotencyTTL: a message with the same one is a
	// duplicate and not stored. While the first is in flight, the second waits for it, and is stored if that one rolls back. 1
	// to 200 characters, valid UTF-8 without NUL; "" for none.
	IdempotencyKey string
}

// Produced is what became of a message.
type Produced struct {
	// ID is its position in the topic; that of the first message with its idempotency key when it is a Duplicate, and was
	// not stored.
	ID        int64 `json:"id"`
	Duplicate bool  `json:"duplicate"`
}

// Produce stores messages in a transaction of its own, all of them or none, and returns what became of each, in order. When it
// has returned they are as durable as the server's commits are, and consumers are woken.
//
// Concurrent calls share transactions by themselves: one that comes while others of its topic are under way goes together with the
// next. Each is stored or refused for itself all the same.
//
// After a lost connection, a restart of the server or the like it tries again, until ctx ends or Options.ProduceRetry has
// passed. However often it tries, and whenever an attempt arrives, the messages are stored once.
//
// Errors: ErrTopicNotFound; ErrFormat and ErrInvalid, which name the message; ErrStandby; ErrSequence; ErrUnknownOutcome: the
// messages may or may not be stored, or may yet be. After any other error nothing was stored, and nothing will be.
func (c *Client) Produce(ctx context.Context, topic string, messages ...Message) ([]Produced, error) {
	produced, err := c.produceShared(ctx, topic, messages)
	if slices.ContainsFunc(produced, func(p Produced) bool { return !p.Duplicate }) {
		c.Wake(topic)
	}
	return produced, err
}

// ProduceTx is Produce within a transaction of the caller's: the messages exist once it commits, and never if it does not.
// Consumers find them by polling, within ConsumerOptions.PollInterval; call Wake after the commit to have them found at
// once. It does not try again. What the server refuses, such as a message that does not fit the topic's format, ends the
// transaction; a duplicate does not.
func (c *Client) ProduceTx(ctx context.Context, tx pgx.Tx, topic string, messages ...Message) ([]Produced, error) {
	return c.produce(ctx, tx, topic, messages)
}

// SQLTx is a transaction of database/sql: a *sql.Tx, or a *sql.Conn with one open, of pgx's driver or another that knows
// $1 as a placeholder.
type SQLTx interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// ProduceSQL is ProduceTx for a transaction of database/sql.
func (c *Client) ProduceSQL(ctx context.Context, tx SQLTx, topic string, messages ...Message) ([]Produced, error) {
	info, err := c.topicInfoSQL(ctx, tx, topic)
	if err != nil {
		return nil, wrap(err, "produce to topic %q", topic)
	}
	b, err := encode(info.format, messages)
	if err != nil || len(messages) == 0 {
		return nil, c.failed(topic, b, err)
	}
	payloads := make([]*string, len(messages))
	for i, p := range b.payloads {
		if p == nil {
			continue
		}
		text := string(p)
		if info.format == Bytes {
			text = fmt.Sprintf(`\x%x`, p)
		}
		payloads[i] = &text
	}
	args := []any{topic, arrayText(payloads)}
	for _, list := range b.lists() {
		if list == nil {
			args = append(args, nil)
		} else {
			args = append(args, arrayText(list))
		}
	}
	rows, err := tx.QueryContext(ctx, c.text(b.statement), append(args, nil, nil)...)
	if err != nil {
		return nil, c.failed(topic, b, explain(err))
	}
	defer rows.Close()
	produced := make([]Produced, 0, len(messages))
	for rows.Next() {
		var p Produced
		if err := rows.Scan(&p.ID, &p.Duplicate); err != nil {
			return nil, err
		}
		produced = append(produced, p)
	}
	if err := rows.Err(); err != nil {
		return nil, c.failed(topic, b, explain(err))
	}
	return produced, nil
}

// failed gives a failed produce its error, and forgets what is known of the topic where it may have been dropped and made
// anew.
func (c *Client) failed(topic string, b *batch, err error) error {
	if errors.Is(err, ErrFormat) || errors.Is(err, ErrTopicNotFound) {
		c.topics.Delete(topic)
	}
	return wrap(b.blame(err), "produce to topic %q", topic)
}

func (c *Client) produce(ctx context.Context, q querier, topic string, messages []Message) ([]Produced, error) {
	info, err := c.topicInfo(ctx, q, topic)
	if err != nil {
		return nil, wrap(err, "produce to topic %q", topic)
	}
	b, err := encode(info.format, messages)
	if err != nil || len(messages) == 0 {
		return nil, c.failed(topic, b, err)
	}
	produced, err := c.send(ctx, q, topic, b, nil)
	if err != nil {
		return nil, c.failed(topic, b, err)
	}
	return produced, nil
}

// send stores a batch through q, as the next one of a producer's where there is one.
func (c *Client) send(ctx context.Context, q querier, topic string, b *batch, p *producer) ([]Produced, error) {
	var payloads any = b.payloads
	if b.format != Bytes {
		texts := make([]*string, len(b.payloads))
		for i, p := range b.payloads {
			if p != nil {
				text := string(p)
				texts[i] = &text
			}
		}
		payloads = texts
	}
	args := []any{topic, payloads}
	for _, list := range b.lists() {
		args = append(args, list)
	}
	if p != nil {
		args = append(args, p.id, p.batch)
	} else {
		args = append(args, nil, nil)
	}
	produced := make([]Produced, 0, len(b.payloads))
	err := c.query(ctx, q, b.statement, args, func(rows pgx.Rows) error {
		var p Produced
		err := rows.Scan(&p.ID, &p.Duplicate)
		produced = append(produced, p)
		return err
	})
	return produced, err
}

// messageSeq is a stream of messages.
type messageSeq = iter.Seq2[Message, error]

// Copy stores a stream of messages by COPY, in one transaction of its own: all of them or none. It is the quickest way for
// many; it gives no ids. It returns how many were stored, duplicates left out. An error that messages yields ends it.
//
// A stream cannot be sent again. When the connection is lost at the commit, Copy asks the server for the outcome, until ctx ends or
// Options.ProduceRetry has passed.
//
// It needs INSERT on the log's columns key, headers and payload, and on deliver_at, priority and timeout for messages that
// have those. Without that, and for messages with an IdempotencyKey, it goes on with weir.produce_batch. Errors: as for
// Produce.
func (c *Client) Copy(ctx context.Context, topic string, messages iter.Seq2[Message, error]) (int64, error) {
	if err := c.ready(ctx, nil); err != nil {
		return 0, err
	}
	stored, p, lost, err := c.copyOwn(ctx, topic, messages)
	if lost {
		was, unknown := c.closed(ctx, p, c.newRetry())
		switch {
		case unknown:
			err = fmt.Errorf("%w: %w", ErrUnknownOutcome, ended(ctx, err))
		case was:
			err = nil
		default:
			err = fmt.Errorf("nothing was stored: %w", err)
		}
		err = wrap(err, "copy to topic %q", topic)
	}
	if err != nil {
		return 0, err
	}
	if stored > 0 {
		c.Wake(topic)
	}
	return stored, nil
}

// CopyTx is Copy within a transaction of the caller's.
func (c *Client) CopyTx(ctx context.Context, tx pgx.Tx, topic string, messages iter.Seq2[Message, error]) (int64, error) {
	return c.copyInto(ctx, tx, topic, messages)
}

// copier is a connection or a transaction that messages are copied through.
type copier interface {
	querier
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error)
}

func (c *Client) copyInto(ctx context.Context, to copier, topic string, messages messageSeq) (int64, error) {
	c.topics.Delete(topic) // COPY names the log: ask which it is now
	info, err := c.topicInfo(ctx, to, topic)
	if err != nil {
		return 0, wrap(err, "copy to topic %q", topic)
	}
	var (
		stored, taken int64
		chunk         []Message
		size          int
	)
	flush := func() error {
		if len(chunk) == 0 {
			return nil
		}
		b, err := encode(info.format, chunk)
		if err != nil {
			return err
		}
		if !info.canCopy || b.idempotencyKeys != nil || b.options() && !info.canCopyAll {
			produced, err := c.send(ctx, to, topic, b, nil)
			if err != nil {
				return b.blame(err)
			}
			for _, p := range produced {
				if !p.Duplicate {
					stored++
				}
			}
		} else {
			if err := c.copyChunk(ctx, to, topic, info, b, chunk); err != nil {
				return b.blame(err)
			}
			stored += int64(len(chunk))
		}
		taken += int64(len(chunk))
		chunk, size = chunk[:0], 0
		return nil
	}
	for m, err := range messages {
		if err != nil {
			return 0, wrap(err, "copy to topic %q: after message %d", topic, taken+int64(len(chunk)))
		}
		payload, err := encodeMessage(info.format, &m)
		if err != nil {
			return 0, wrap(err, "copy to topic %q: message %d", topic, taken+int64(len(chunk)))
		}
		if !m.Tombstone {
			m.Payload = payload
		}
		chunk = append(chunk, m)
		size += len(payload)
		if len(chunk) == copyChunk || size > maxBatch/16 {
			if err := flush(); err != nil {
				return 0, wrap(err, "copy to topic %q: messages from %d", topic, taken+1)
			}
		}
	}
	if err := flush(); err != nil {
		return 0, wrap(err, "copy to topic %q: messages from %d", topic, taken+1)
	}
	return stored, nil
}

// copyChunk sends one COPY.
func (c *Client) copyChunk(ctx context.Context, to copier, topic string, info topicInfo, b *batch, chunk []Message) error {
	columns := []string{"key", "headers", "payload"}
	var now time.Time
	if b.options() {
		columns = append(columns, "deliver_at", "priority", "timeout")
	}
	if b.delays != nil {
		var err error
		if now, err = one[time.Time](ctx, c, to, "clock"); err != nil {
			return err
		}
	}
	// However much room there was made, others can have used it up by now. A COPY that finds none is taken back and sent again.
	for try := 1; ; try++ {
		if err := exec(ctx, to, "savepoint weir_copy"); err != nil {
			return err
		}
		_, err := one[any](ctx, c, to, "make_room", topic, len(chunk))
		if err == nil {
			err = c.sendCopy(ctx, to, info, b, chunk, columns, now)
		}
		var pg *pgconn.PgError
		if err == nil {
			return exec(ctx, to, "release savepoint weir_copy")
		} else if !errors.As(err, &pg) || pg.Code != "23514" || pg.ConstraintName != "" || try == 20 {
			return err
		}
		if err := exec(ctx, to, "rollback to savepoint weir_copy"); err != nil {
			return err
		}
	}
}

// exec runs a session command.
func exec(ctx context.Context, q querier, command string) error {
	rows, err := q.Query(ctx, command)
	if err != nil {
		return err
	}
	rows.Close()
	return rows.Err()
}

func (c *Client) sendCopy(
	ctx context.Context, to copier, info topicInfo, b *batch, chunk []Message, columns []string, now time.Time,
) error {
	_, err := to.CopyFrom(ctx, pgx.Identifier{c.schema, fmt.Sprintf("log_%d", info.id)}, columns,
		pgx.CopyFromSlice(len(chunk), func(i int) ([]any, error) {
			row := make([]any, len(columns))
			if b.payloads[i] != nil {
				row[2] = b.payloads[i]
			}
			if b.keys != nil && b.keys[i] != nil {
				row[0] = *b.keys[i]
			}
			if b.headers != nil && b.headers[i] != nil {
				row[1] = []byte(*b.headers[i])
			}
			if b.options() {
				m := &chunk[i]
				switch {
				case !m.DeliverAt.IsZero():
					row[3] = m.DeliverAt
				case m.Delay != 0:
					row[3] = now.Add(m.Delay)
				}
				if m.Priority != 0 {
					row[4] = int16(m.Priority)
				}
				if m.Timeout != 0 {
					row[5] = m.Timeout
				}
			}
			return row, nil
		}))
	return explain(err)
}

// batch is a set of messages as the server takes it.
type batch struct {
	statement string
	format    Format
	payloads  [][]byte
	// nil where no message has one
	keys, headers, deliverAt, delays, priorities, timeouts, idempotencyKeys []*string
}

// lists are the arguments of weir.produce_batch after the payloads.
func (b *batch) lists() [][]*string {
	return [][]*string{b.keys, b.headers, b.deliverAt, b.delays, b.priorities, b.timeouts, b.idempotencyKeys}
}

// options reports whether a message has more than key, headers and payload.
func (b *batch) options() bool {
	return b.deliverAt != nil || b.delays != nil || b.priorities != nil || b.timeouts != nil
}

// set sets an entry of a list.
func (b *batch) set(list *[]*string, i int, text string) {
	if *list == nil {
		*list = make([]*string, len(b.payloads))
	}
	(*list)[i] = &text
}

// encode checks messages and turns them into a batch.
func encode(format Format, messages []Message) (*batch, error) {
	n := len(messages)
	b := &batch{
		statement: "produce_batch", format: format,
		payloads: make([][]byte, n),
	}
	if format == Bytes {
		b.statement = "produce_batch_bytes"
	}
	total := 0
	for i := range messages {
		m := &messages[i]
		payload, err := encodeMessage(format, m)
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		if len(payload) > MaxPayload {
			return nil, fmt.Errorf("message %d: %w", i, invalid("payload", fmt.Sprintf("%d bytes", len(payload)), fmt.Sprintf("it must have at most %d: store it elsewhere and produce a reference", MaxPayload)))
		}
		if total += len(payload); total > maxBatch {
			return nil, invalid("messages", fmt.Sprintf("more than %d bytes", maxBatch), "produce them in several batches, or with Copy")
		}
		b.payloads[i] = payload
		if m.Key != "" {
			if err := checkText("key", m.Key); err != nil {
				return nil, fmt.Errorf("message %d: %w", i, err)
			}
			if len(m.Key) > maxKey {
				return nil, fmt.Errorf("message %d: %w", i, invalid("key", fmt.Sprintf("%d bytes", len(m.Key)), fmt.Sprintf("it must have at most %d: put what is longer into the payload", maxKey)))
			}
			b.set(&b.keys, i, m.Key)
		}
		if len(m.Headers) > 0 {
			for k, v := range m.Headers {
				if err := checkText("header", k); err != nil {
					return nil, fmt.Errorf("message %d: %w", i, err)
				}
				if err := checkText("header "+k, v); err != nil {
					return nil, fmt.Errorf("message %d: %w", i, err)
				}
			}
			text, err := json.Marshal(m.Headers)
			if err != nil {
				return nil, fmt.Errorf("message %d: headers: %w", i, err)
			}
			b.set(&b.headers, i, string(text))
		}
		if err := b.encodeOptions(i, m); err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
	}
	return b, nil
}

// encodeOptions checks and encodes what a message has more than key, headers and payload.
func (b *batch) encodeOptions(i int, m *Message) error {
	if !m.DeliverAt.IsZero() {
		at := m.DeliverAt.UTC()
		if m.Delay != 0 {
			return invalid("delay", m.Delay, "it must not be given together with a time of delivery")
		}
		if at.Year() < 1 || at.Year() > 9999 {
			return invalid("time of delivery", at, "it must be within the years 1 to 9999")
		}
		b.set(&b.deliverAt, i, at.Format("2006-01-02 15:04:05.999999Z07:00"))
	}
	if m.Delay != 0 {
		if m.Delay < 0 || m.Delay > maxDelay {
			return invalid("delay", m.Delay, "it must be from 0 s to 3650 days")
		}
		b.set(&b.delays, i, intervalText(m.Delay))
	}
	if m.Priority != 0 {
		if m.Priority < -maxPriority || m.Priority > maxPriority {
			return invalid("priority", m.Priority, fmt.Sprintf("it must be from %d to %d", -maxPriority, maxPriority))
		}
		b.set(&b.priorities, i, strconv.Itoa(m.Priority))
	}
	if m.Timeout != 0 {
		if m.Timeout < time.Millisecond || m.Timeout > maxTimeout {
			return invalid("timeout", m.Timeout, "it must be from 1 ms to 7 days, or 0 for that of the consumer")
		}
		b.set(&b.timeouts, i, intervalText(m.Timeout))
	}
	if m.IdempotencyKey != "" {
		if err := checkText("idempotency key", m.IdempotencyKey); err != nil {
			return err
		}
		if n := utf8.RuneCountInString(m.IdempotencyKey); n > maxIdempotencyKey {
			return invalid("idempotency key", fmt.Sprintf("%d characters", n), fmt.Sprintf("it must have at most %d: a hash of it is as good", maxIdempotencyKey))
		}
		b.set(&b.idempotencyKeys, i, m.IdempotencyKey)
	}
	return nil
}

// intervalText writes a length of time as every server reads it.
func intervalText(d time.Duration) string {
	return fmt.Sprintf("%d.%06d s", d/time.Second, d%time.Second/time.Microsecond)
}

// encodeMessage gives the payload as it is stored, nil for a tombstone.
func encodeMessage(format Format, m *Message) ([]byte, error) {
	if !m.Tombstone {
		return encodePayload(format, m.Payload)
	}
	if m.Payload != nil {
		return nil, invalid("payload", "given", "a tombstone has none")
	}
	return nil, nil
}

func encodePayload(format Format, payload any) ([]byte, error) {
	switch p := payload.(type) {
	case []byte:
		if p == nil {
			return nil, fmt.Errorf("%w: payload is nil", ErrFormat)
		}
		return p, nil
	case json.RawMessage:
		if p == nil {
			return nil, fmt.Errorf("%w: payload is nil", ErrFormat)
		}
		return p, nil
	case string:
		if format == Bytes {
			return []byte(p), nil
		}
		if !utf8.ValidString(p) { // json.Marshal would put other characters in its place
			return nil, fmt.Errorf("%w: payload %q must be valid UTF-8", ErrFormat, p)
		}
	}
	if format == Bytes {
		return nil, fmt.Errorf("%w: payload is a %T, a bytes topic takes []byte or string", ErrFormat, payload)
	}
	text, err := json.Marshal(payload)
	if err != nil {
		return nil, fmt.Errorf("%w: payload: %w", ErrFormat, err)
	}
	return text, nil
}

// blame adds to an error about the format which message of the batch it is about.
func (b *batch) blame(err error) error {
	if b == nil || b.format == Bytes || !errors.Is(err, ErrFormat) {
		return err
	}
	for i, p := range b.payloads {
		if !json.Valid(p) || !utf8.Valid(p) {
			return fmt.Errorf("message %d: %w", i, err)
		}
	}
	return err
}

func checkText(field, s string) error {
	if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
		return fmt.Errorf("%w: %s %q must be valid UTF-8 without NUL", ErrFormat, field, s)
	}
	return nil
}

// arrayText writes an array as the server reads it from text.
func arrayText(values []*string) string {
	var s strings.Builder
	s.WriteByte('{')
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	for i, v := range values {
		if i > 0 {
			s.WriteByte(',')
		}
		if v == nil {
			s.WriteString("NULL")
			continue
		}
		s.WriteByte('"')
		s.WriteString(escape.Replace(*v))
		s.WriteByte('"')
	}
	s.WriteByte('}')
	return s.String()
}

// Received is a message as a consumer gets it.
type Received[T any] struct {
	// ID is its position in the topic.
	ID    int64
	Topic string
	Group string
	// Key is "" for none.
	Key string
	// Headers is nil for none. A value that is no string, which SQL can store, is its JSON text.
	Headers map[string]string
	// Value is the payload, decoded; Raw is the payload as it was stored.
	Value T
	Raw   []byte
	// Tombstone: the message says that its key is gone (Message.Tombstone). Value is zero, Raw nil.
	Tombstone bool
	// ProducedAt is when the server stored it, by its clock.
	ProducedAt time.Time
	// Attempt counts this one: 1 the first time. A group that is moved back counts anew.
	Attempt int
}
