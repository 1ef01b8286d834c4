package weir

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

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

// DeadFilter picks dead letters: those for which everything holds that is given. The zero value picks all.
type DeadFilter struct {
	// IDs are the only ones that are picked; nil: any. A list that is empty but not nil picks none.
	IDs []int64
	// Key is theirs, or begins with KeyPrefix; "": any.
	Key, KeyPrefix string
	// Headers are among theirs, with these values.
	Headers map[string]string
	// Error is part of the text of the last attempt's error; "": any.
	Error string
	// They were produced, and died, at or after the one time and before the other; zero: at any time.
	ProducedAfter, ProducedBefore time.Time
	DiedAfter, DiedBefore         time.Time
	// MinAttempts is how many attempts they had at the least.
	MinAttempts int
}

// text is the filter as the server takes it, nil for all.
func (f DeadFilter) text() (any, error) {
	wanted := map[string]any{}
	if f.IDs != nil {
		wanted["ids"] = f.IDs
	}
	texts := []string{f.Key, f.KeyPrefix, f.Error}
	for i, name := range []string{"key", "key_prefix", "error"} {
		if texts[i] != "" {
			wanted[name] = texts[i]
		}
	}
	if len(f.Headers) > 0 {
		wanted["headers"] = f.Headers
		for name, value := range f.Headers {
			texts = append(texts, name, value)
		}
	}
	for _, text := range texts {
		if !utf8.ValidString(text) || strings.Contains(text, "\x00") {
			return nil, invalid("filter", fmt.Sprintf("%q", text), "it must be valid UTF-8 without NUL")
		}
	}
	for name, t := range map[string]time.Time{
		"produced_after": f.ProducedAfter, "produced_before": f.ProducedBefore, "died_after": f.DiedAfter, "died_before": f.DiedBefore,
	} {
		if !t.IsZero() {
			wanted[name] = t.UTC().Format(time.RFC3339Nano)
		}
	}
	if f.MinAttempts != 0 {
		wanted["min_attempts"] = f.MinAttempts
	}
	if len(wanted) == 0 {
		return nil, nil
	}
	text, err := json.Marshal(wanted)
	return string(text), err
}

// DeadLetters lists the dead letters of a group with an id greater than after, in id order, at most max (1 to 10,000). Call it again
// with the last id for more. Errors: ErrTopicNotFound, ErrGroupNotFound, ErrInvalid.
func (c *Client) DeadLetters(ctx context.Context, topic, group string, after int64, max int) ([]DeadLetter, error) {
	return c.FindDeadLetters(ctx, topic, group, DeadFilter{}, after, max)
}

// DeadLetter returns one of them. Errors: ErrTopicNotFound, ErrGroupNotFound, ErrNoMessage.
func (c *Client) DeadLetter(ctx context.Context, topic, group string, id int64) (DeadLetter, error) {
	var list []DeadLetter
	var err error
	if id > 0 {
		list, err = c.FindDeadLetters(ctx, topic, group, DeadFilter{IDs: []int64{id}}, 0, 1)
	}
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%w: group %q of topic %q has no dead letter %d", ErrNoMessage, group, topic, id)
	}
	if err != nil {
		return DeadLetter{}, err
	}
	return list[0], nil
}

// FindDeadLetters is DeadLetters for those that a filter picks. Without IDs, one that picks few of many reads all of them.
func (c *Client) FindDeadLetters(
	ctx context.Context, topic, group string, filter DeadFilter, after int64, max int,
) (list []DeadLetter, err error) {
	wanted, err := filter.text()
	if err == nil {
		err = c.query(ctx, nil, "dead", []any{topic, group, wanted, after, max}, func(rows pgx.Rows) error {
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
	}
	return list, wrap(err, "list dead letters of group %q of topic %q", group, topic)
}

// Redrive gives a dead message another life: it is due at once, its attempts are counted from none. id 0: all of the group. It
// returns how many there were. Errors: as for RedriveMany.
func (c *Client) Redrive(ctx context.Context, topic, group string, id int64) (int64, error) {
	return c.RedriveMany(ctx, topic, group, only(id), nil)
}

// RedriveOptions say how dead letters are redriven.
type RedriveOptions struct {
	// To is a topic that they are produced to, as new messages with their keys, headers, payloads, priorities and time limits; they
	// are then dead letters no more. The headers weir-dead-topic, weir-dead-group, weir-dead-id, weir-dead-attempts and
	// weir-dead-error (the last one) say where each comes from. Default "": their own group handles them again.
	To string
	// Chunk is how many are redriven in a transaction at the most, 1 to 1,000,000. Default 1,000.
	Chunk int
	// Progress, if not nil, is called after each transaction with how many were redriven until then.
	Progress func(done int64)
}

// RedriveMany gives the dead messages that a filter picks another life, in id order and many in a transaction: they are due at
// once, their attempts are counted from none, their errors stay. In an ordered group they take their place in their key
// again. It returns how many there were; after an error too, for what was committed before. Call it again to go on.
//
// Errors: ErrTopicNotFound, ErrGroupNotFound, ErrInvalid, ErrFormat (one does not fit the other topic), ErrStandby.
func (c *Client) RedriveMany(ctx context.Context, topic, group string, filter DeadFilter, o *RedriveOptions) (int64, error) {
	if o == nil {
		o = &RedriveOptions{}
	}
	n, err := c.deadParts(ctx, "redrive", topic, group, filter, o.Chunk, func(done int64) {
		c.Wake(cmp.Or(o.To, topic))
		if o.Progress != nil {
			o.Progress(done)
		}
	}, null(o.To))
	return n, wrap(err, "redrive group %q of topic %q", group, topic)
}

// Purge removes a dead message for good; the log keeps its own copy. id 0: all of the group. It returns how many there were.
// Errors: as for PurgeMany.
func (c *Client) Purge(ctx context.Context, topic, group string, id int64) (int64, error) {
	return c.PurgeMany(ctx, topic, group, only(id), nil)
}

// PurgeOptions say how dead letters are purged.
type PurgeOptions struct {
	// Chunk is how many are removed in a transaction at the most, 1 to 1,000,000. Default 1,000.
	Chunk int
	// Progress, if not nil, is called after each transaction with how many were removed until then.
	Progress func(done int64)
}

// PurgeMany removes the dead messages that a filter picks for good, many in a transaction; the log keeps its own copies. It returns
// how many there were, as RedriveMany does. Errors: ErrTopicNotFound, ErrGroupNotFound, ErrInvalid, ErrStandby.
func (c *Client) PurgeMany(ctx context.Context, topic, group string, filter DeadFilter, o *PurgeOptions) (int64, error) {
	if o == nil {
		o = &PurgeOptions{}
	}
	n, err := c.deadParts(ctx, "purge", topic, group, filter, o.Chunk, func(done int64) {
		if o.Progress != nil {
			o.Progress(done)
		}
	})
	return n, wrap(err, "purge group %q of topic %q", group, topic)
}

// deadParts sends a statement for one part of the dead letters after the other. It counts them, and calls did after each part that
// had some.
func (c *Client) deadParts(
	ctx context.Context, statement, topic, group string, filter DeadFilter, chunk int, did func(done int64), args ...any,
) (done int64, err error) {
	wanted, err := filter.text()
	if err != nil {
		return 0, err
	}
	if chunk == 0 {
		chunk = 1000
	}
	for next := new(int64); next != nil; {
		var n int64
		after := *next
		err := c.query(ctx, nil, statement, append([]any{topic, group, wanted, after, chunk}, args...), func(rows pgx.Rows) error {
			return rows.Scan(&n, &next)
		})
		if err != nil {
			return done, err
		}
		done += n
		if n > 0 {
			did(done)
		}
	}
	return done, nil
}

// only picks the dead letter of that id, or all for 0.
func only(id int64) DeadFilter {
	if id == 0 {
		return DeadFilter{}
	}
	return DeadFilter{IDs: []int64{id}}
}
