package weir

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

const (
	// MaxPayload is the largest payload of one message, in bytes.
	MaxPayload = 128 << 20
	// maxBatch is what one statement carries at the most; the server takes less than 1 GB.
	maxBatch = 256 << 20
	// copyChunk is how many messages one COPY stores at the most: the log has room made for so many before it begins.
	copyChunk = 10_000
)

// Message is a message to produce.
type Message struct {
	// Key is what the message is about; "" for none. Valid UTF-8 without NUL.
	Key string
	// Headers go with the message. Valid UTF-8 without NUL. The server keeps them as jsonb.
	Headers map[string]string
	// Payload is stored as it is when it is a []byte or json.RawMessage; on a bytes topic a string too. Anything else is
	// marshalled as JSON. At most MaxPayload bytes.
	Payload any
}

// Produce stores messages in a transaction of its own, all of them or none, and returns their ids in order. When it has
// returned they are as durable as the server's commits are, and consumers are woken.
//
// Errors: ErrTopicNotFound; ErrFormat, which names the message; ErrInvalid; ErrStandby; ErrSequence. After any other error,
// such as a lost connection, the messages may or may not be stored.
func (c *Client) Produce(ctx context.Context, topic string, messages ...Message) ([]int64, error) {
	ids, err := c.produce(ctx, nil, topic, messages)
	if err == nil && len(ids) > 0 {
		c.Wake(topic)
	}
	return ids, err
}

// ProduceTx is Produce within a transaction of the caller's: the messages exist once it commits, and never if it does not.
// Consumers find them by polling, within ConsumerOptions.PollInterval; call Wake after the commit to have them found at
// once. A message that does not fit the topic's format is refused by the server, which ends the transaction.
func (c *Client) ProduceTx(ctx context.Context, tx pgx.Tx, topic string, messages ...Message) ([]int64, error) {
	return c.produce(ctx, tx, topic, messages)
}

// SQLTx is a transaction of database/sql: a *sql.Tx, or a *sql.Conn with one open, of pgx's driver or another that knows
// $1 as a placeholder.
type SQLTx interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// ProduceSQL is ProduceTx for a transaction of database/sql.
func (c *Client) ProduceSQL(ctx context.Context, tx SQLTx, topic string, messages ...Message) ([]int64, error) {
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
		text := string(p)
		if info.format == Bytes {
			text = fmt.Sprintf(`\x%x`, p)
		}
		payloads[i] = &text
	}
	rows, err := tx.QueryContext(ctx, c.text(b.statement), topic, arrayText(payloads), arrayText(b.keys), arrayText(b.headers))
	if err != nil {
		return nil, c.failed(topic, b, explain(err))
	}
	defer rows.Close()
	ids := make([]int64, 0, len(messages))
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		return nil, c.failed(topic, b, explain(err))
	}
	return ids, nil
}

// failed gives a failed produce its error, and forgets what is known of the topic where it may have been dropped and made
// anew.
func (c *Client) failed(topic string, b *batch, err error) error {
	if errors.Is(err, ErrFormat) || errors.Is(err, ErrTopicNotFound) {
		c.topics.Delete(topic)
	}
	return wrap(b.blame(err), "produce to topic %q", topic)
}

func (c *Client) produce(ctx context.Context, q querier, topic string, messages []Message) ([]int64, error) {
	info, err := c.topicInfo(ctx, q, topic)
	if err != nil {
		return nil, wrap(err, "produce to topic %q", topic)
	}
	b, err := encode(info.format, messages)
	if err != nil || len(messages) == 0 {
		return nil, c.failed(topic, b, err)
	}
	var payloads any = b.payloads
	if info.format != Bytes {
		texts := make([]string, len(b.payloads))
		for i, p := range b.payloads {
			texts[i] = string(p)
		}
		payloads = texts
	}
	ids := make([]int64, 0, len(messages))
	err = c.query(ctx, q, b.statement, []any{topic, payloads, b.keys, b.headers}, func(rows pgx.Rows) error {
		var id int64
		err := rows.Scan(&id)
		ids = append(ids, id)
		return err
	})
	if err != nil {
		return nil, c.failed(topic, b, err)
	}
	return ids, nil
}

// Copy stores a stream of messages by COPY, in one transaction of its own: all of them or none. It is the quickest way for
// many; it gives no ids. It returns how many were stored. An error that messages yields ends it.
//
// It needs INSERT on the log's columns key, headers and payload; without that it goes on with weir.produce_many. Errors: as
// for Produce.
func (c *Client) Copy(ctx context.Context, topic string, messages iter.Seq2[Message, error]) (int64, error) {
	if err := c.ready(ctx, nil); err != nil {
		return 0, err
	}
	var stored int64
	err := pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
		stored, err = c.CopyTx(ctx, tx, topic, messages)
		return err
	})
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
	c.topics.Delete(topic) // COPY names the log: ask which it is now
	info, err := c.topicInfo(ctx, tx, topic)
	if err != nil {
		return 0, wrap(err, "copy to topic %q", topic)
	}
	var (
		stored int64
		chunk  []Message
		size   int
	)
	flush := func() error {
		if len(chunk) == 0 {
			return nil
		}
		if !info.canCopy {
			if _, err := c.produce(ctx, tx, topic, chunk); err != nil {
				return err
			}
		} else {
			b, err := encode(info.format, chunk)
			if err != nil {
				return err
			}
			if _, err := one[any](ctx, c, tx, "make_room", topic, len(chunk)); err != nil {
				return err
			}
			_, err = tx.CopyFrom(ctx, pgx.Identifier{c.schema, fmt.Sprintf("log_%d", info.id)}, []string{"key", "headers", "payload"},
				pgx.CopyFromSlice(len(chunk), func(i int) ([]any, error) {
					row := []any{nil, nil, b.payloads[i]}
					if b.keys[i] != nil {
						row[0] = *b.keys[i]
					}
					if b.headers[i] != nil {
						row[1] = []byte(*b.headers[i])
					}
					return row, nil
				}))
			if err != nil {
				return b.blame(explain(err))
			}
		}
		stored += int64(len(chunk))
		chunk, size = chunk[:0], 0
		return nil
	}
	for m, err := range messages {
		if err != nil {
			return 0, wrap(err, "copy to topic %q: after message %d", topic, stored+int64(len(chunk)))
		}
		payload, err := encodePayload(info.format, m.Payload)
		if err != nil {
			return 0, wrap(err, "copy to topic %q: message %d", topic, stored+int64(len(chunk)))
		}
		m.Payload = payload
		chunk = append(chunk, m)
		size += len(payload)
		if len(chunk) == copyChunk || size > maxBatch/16 {
			if err := flush(); err != nil {
				return 0, wrap(err, "copy to topic %q: messages from %d", topic, stored+1)
			}
		}
	}
	if err := flush(); err != nil {
		return 0, wrap(err, "copy to topic %q: messages from %d", topic, stored+1)
	}
	return stored, nil
}

// batch is a set of messages as the server takes it.
type batch struct {
	statement string
	format    Format
	payloads  [][]byte
	keys      []*string
	headers   []*string
}

// encode checks messages and turns them into a batch.
func encode(format Format, messages []Message) (*batch, error) {
	n := len(messages)
	b := &batch{
		statement: "produce_many", format: format,
		payloads: make([][]byte, n), keys: make([]*string, n), headers: make([]*string, n),
	}
	if format == Bytes {
		b.statement = "produce_many_bytes"
	}
	total := 0
	for i := range messages {
		m := &messages[i]
		payload, err := encodePayload(format, m.Payload)
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
			b.keys[i] = &m.Key
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
			s := string(text)
			b.headers[i] = &s
		}
	}
	return b, nil
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
	// ProducedAt is when the server stored it, by its clock.
	ProducedAt time.Time
	// Attempt counts this one: 1 the first time. A group that is moved back counts anew.
	Attempt int
}
