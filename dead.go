package weir

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// DeadLetter is a message that a group has given up on.
type DeadLetter struct {
	Received[[]byte]
	// Error is that of the last attempt; Errors are those of all attempts, the oldest first.
	Error  string
	DiedAt time.Time
	Errors []AttemptError
}

// AttemptError is what went wrong in one attempt.
type AttemptError struct {
	Attempt int       `json:"attempt"`
	At      time.Time `json:"at"`
	Error   string    `json:"error"`
}

// DeadLetters lists the dead letters of a group with an id greater than after, in id order, at most max.
func (c *Client) DeadLetters(ctx context.Context, topic, group string, after int64, max int) ([]DeadLetter, error) {
	return c.deadList(ctx, topic, group, nil, after, max)
}

// DeadLetter returns one of them. Errors: ErrNoMessage.
func (c *Client) DeadLetter(ctx context.Context, topic, group string, id int64) (DeadLetter, error) {
	list, err := c.deadList(ctx, topic, group, id, 0, 1)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%w: group %q of topic %q has no dead letter %d", ErrNoMessage, group, topic, id)
	}
	if err != nil {
		return DeadLetter{}, err
	}
	return list[0], nil
}

func (c *Client) deadList(ctx context.Context, topic, group string, id any, after int64, max int) (list []DeadLetter, err error) {
	if _, err := one[string](ctx, c, nil, "group_info", topic, group); err != nil {
		return nil, wrap(err, "list dead letters")
	}
	err = c.query(ctx, nil, "dead", []any{topic, group, id, after, max}, func(rows pgx.Rows) error {
		d := DeadLetter{}
		var key, headers *string
		var errs string
		var payload, data []byte
		err := rows.Scan(&d.ID, &d.Attempt, &d.Error, &d.DiedAt, &key, &headers, &payload, &data, &d.ProducedAt, &errs)
		if err != nil {
			return err
		}
		d.Topic, d.Group, d.Value = topic, group, payload
		if payload == nil {
			d.Value = data
		}
		d.Raw = d.Value
		if key != nil {
			d.Key = *key
		}
		if headers != nil {
			d.Headers = readHeaders(*headers)
		}
		list = append(list, d)
		return json.Unmarshal([]byte(errs), &list[len(list)-1].Errors)
	})
	return list, wrap(err, "list dead letters of group %q of topic %q", group, topic)
}

// Redrive gives a dead message another life: it is due at once, its attempts are counted from none. id 0: all of the
// group. It returns how many there were. Errors: ErrTopicNotFound, ErrGroupNotFound.
func (c *Client) Redrive(ctx context.Context, topic, group string, id int64) (int64, error) {
	n, err := one[int64](ctx, c, nil, "redrive", topic, group, nullID(id))
	if err == nil && n > 0 {
		c.Wake(topic)
	}
	return n, wrap(err, "redrive group %q of topic %q", group, topic)
}

// Purge removes a dead message for good; the log keeps its own copy. id 0: all of the group. It returns how many there were.
// Errors: ErrTopicNotFound, ErrGroupNotFound.
func (c *Client) Purge(ctx context.Context, topic, group string, id int64) (int64, error) {
	n, err := one[int64](ctx, c, nil, "purge", topic, group, nullID(id))
	return n, wrap(err, "purge group %q of topic %q", group, topic)
}

func nullID(id int64) any {
	if id == 0 {
		return nil
	}
	return id
}
