package weir

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
)

// Read returns the next messages of a topic after an id (0: from the beginning), in id order and without a group: at most
// max (1 to 10,000), none past the settled head. Call it again with the last id for more. Errors: ErrTopicNotFound,
// ErrInvalid.
func (c *Client) Read(ctx context.Context, topic string, after int64, max int) ([]Received[[]byte], error) {
	list, err := c.received(ctx, "read", topic, after, max)
	if err != nil {
		return nil, wrap(err, "read topic %q", topic)
	}
	out := make([]Received[[]byte], len(list))
	for i, m := range list {
		m.Topic = topic
		out[i] = *m.as(m.Raw)
	}
	return out, nil
}

// After returns the id after which a position begins, for Read. Errors: ErrTopicNotFound, ErrInvalid.
func (c *Client) After(ctx context.Context, topic string, p Position) (int64, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return 0, err
	}
	id, err := one[int64](ctx, c, nil, "position", topic, string(text))
	return id, wrap(err, "topic %q", topic)
}

// Current returns the latest message of a key in a compacted topic; false where there is none, or it is a tombstone. It also sees
// what groups do not get yet, since it is not settled. Errors: ErrTopicNotFound, ErrInvalid (the topic is not compacted).
func (c *Client) Current(ctx context.Context, topic, key string) (Received[[]byte], bool, error) {
	list, err := c.received(ctx, "current", topic, key)
	if err != nil || len(list) == 0 {
		return Received[[]byte]{}, false, wrap(err, "current message of key %q in topic %q", key, topic)
	}
	m := list[0]
	m.Topic = topic
	return *m.as(m.Raw), true, nil
}

// received runs one of the statements that give messages.
func (c *Client) received(ctx context.Context, name string, args ...any) (list []*raw, err error) {
	err = c.query(ctx, nil, name, args, collect(&list))
	return list, err
}

// collect adds a message for each row to a list.
func collect(list *[]*raw) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		m, err := scanMessage(rows)
		*list = append(*list, m)
		return err
	}
}

func scanMessage(rows pgx.Rows) (*raw, error) {
	m := &raw{}
	var (
		key, headers *string
		payload      []byte
		data         []byte
		timeout      float64
	)
	if err := rows.Scan(&m.ID, &key, &headers, &payload, &data, &m.ProducedAt, &m.Attempt, &m.lease, &timeout); err != nil {
		return m, err
	}
	m.timeout = time.Duration(timeout * float64(time.Second))
	m.Raw = payload
	if payload == nil {
		m.Raw = data
	}
	m.Tombstone = m.Raw == nil
	if key != nil {
		m.Key = *key
	}
	if headers != nil {
		m.Headers = readHeaders(*headers)
	}
	return m, nil
}

// readHeaders takes a JSON object; values that are no strings keep their JSON text.
func readHeaders(text string) map[string]string {
	var values map[string]json.RawMessage
	if json.Unmarshal([]byte(text), &values) != nil {
		return nil
	}
	headers := make(map[string]string, len(values))
	for k, v := range values {
		var s string
		if json.Unmarshal(v, &s) != nil {
			s = string(v)
		}
		headers[k] = s
	}
	return headers
}
