package weir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// Format is how a topic stores its payloads.
type Format string

const (
	// JSON keeps the text of each payload byte for byte. The default.
	JSON Format = "json"
	// JSONB stores payloads parsed, for queries on the log: white space, key order and duplicate keys are lost, and \u0000
	// is refused.
	JSONB Format = "jsonb"
	// Bytes stores anything.
	Bytes Format = "bytes"
)

// TopicOptions are the options of a new topic. The zero value is ready to use.
type TopicOptions struct {
	// Format of the payloads. Default JSON. It cannot be changed later.
	Format Format
	// SegmentSize is how many ids a segment of the log holds, 1,000 to 1,000,000,000. Default 1,000,000.
	SegmentSize int64
	// IdempotencyTTL is how long the topic remembers an idempotency key, 1 s to 365 days. Default 1 day.
	IdempotencyTTL time.Duration
	// RetentionAge is how long messages are kept at least, 1 s to 100 years; RetentionBytes how many bytes of them, indexes
	// included. Default 0: for ever, and without limit. What is past either is removed by segments, but nothing that a group has yet
	// to finish.
	RetentionAge   time.Duration
	RetentionBytes int64
	// DropUnread lets retention remove what groups have yet to finish, too; Group.Missed counts it.
	DropUnread bool
	// Compact keeps only the latest message of each key. Each message needs a key; Message.Tombstone removes one. It cannot be
	// changed later.
	Compact bool
	// TombstoneTTL is how long a tombstone is kept. Default 1 day.
	TombstoneTTL time.Duration
	// Restricted asks for a right on the topic's log besides EXECUTE: INSERT on its column payload to produce, SELECT on it to consume
	// or read. Default false: EXECUTE is enough.
	Restricted bool
}

// TopicChange is what AlterTopic changes. What is nil stays as it is.
type TopicChange struct {
	// SegmentSize counts for segments that are made from then on.
	SegmentSize *int64
	// RetentionAge and RetentionBytes are as in TopicOptions; 0 for none.
	RetentionAge                 *time.Duration
	RetentionBytes               *int64
	DropUnread, Restricted       *bool
	IdempotencyTTL, TombstoneTTL *time.Duration
}

// DropOptions are the options of DropTopic and DropGroup.
type DropOptions struct {
	// Force drops what is live, too: a consumer runs, or holds something. It ends with an error. Default false: refused with
	// ErrInUse.
	Force bool
}

// Topic describes a topic at one moment.
type Topic struct {
	Name   string `json:"topic"`
	Format Format `json:"format"`
	// Log is the partitioned table that holds the messages, with its schema.
	Log string `json:"log"`
	// Head is the highest visible id; Settled the settled head: nothing at or below it can still appear.
	Head        int64     `json:"head"`
	Settled     int64     `json:"settled"`
	SegmentSize int64     `json:"segment_size"`
	Segments    int       `json:"segments"`
	Groups      int       `json:"groups"`
	CreatedAt   time.Time `json:"created_at"`
	// Messages is about how many messages the log has, Bytes what they take on disk, indexes included, OldestAt when the oldest of
	// them was produced.
	Messages int64      `json:"messages"`
	Bytes    int64      `json:"bytes"`
	OldestAt *time.Time `json:"oldest_at,omitempty"`
	// RetentionAge and RetentionBytes are 0 for none.
	RetentionAge   time.Duration `json:"retention_age,omitempty"`
	RetentionBytes int64         `json:"retention_bytes,omitempty"`
	DropUnread     bool          `json:"drop_unread,omitempty"`
	Compact        bool          `json:"compact,omitempty"`
	Restricted     bool          `json:"restricted,omitempty"`
}

// CreateTopic creates a topic. One of that name that exists with the same format is left as it is, so that any number of
// processes may call it at once.
//
// name has 1 to 200 characters, no control characters, and no space at either end. Errors: ErrInvalid, ErrConflict.
func (c *Client) CreateTopic(ctx context.Context, name string, o *TopicOptions) error {
	if err := checkName("topic", name); err != nil {
		return wrap(err, "create topic %q", name)
	}
	options := map[string]any{}
	if o != nil {
		if o.Format != "" {
			options["format"] = o.Format
		}
		if o.SegmentSize != 0 {
			options["segment_size"] = o.SegmentSize
		}
		if o.IdempotencyTTL != 0 {
			if o.IdempotencyTTL < time.Second || o.IdempotencyTTL > 365*24*time.Hour {
				return wrap(invalid("IdempotencyTTL", o.IdempotencyTTL, "it must be from 1 s to 365 days"), "create topic %q", name)
			}
			options["idempotency_ttl"] = intervalText(o.IdempotencyTTL)
		}
		for _, f := range []struct {
			field, option string
			value         time.Duration
		}{{"RetentionAge", "retention_age", o.RetentionAge}, {"TombstoneTTL", "tombstone_ttl", o.TombstoneTTL}} {
			if f.value < 0 {
				return wrap(invalid(f.field, f.value, "it must be from 1 s to 100 years, or 0 for the default"), "create topic %q", name)
			} else if f.value > 0 {
				options[f.option] = intervalText(f.value)
			}
		}
		if o.RetentionBytes != 0 {
			options["retention_bytes"] = o.RetentionBytes
		}
		if o.DropUnread {
			options["drop_unread"] = true
		}
		if o.Compact {
			options["compact"] = true
		}
		if o.Restricted {
			options["restricted"] = true
		}
	}
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	_, err = one[int32](ctx, c, nil, "create_topic", name, string(text))
	return wrap(err, "create topic %q", name)
}

// AlterTopic changes options of a topic. Errors: ErrTopicNotFound, ErrInvalid.
func (c *Client) AlterTopic(ctx context.Context, name string, change TopicChange) error {
	options := map[string]any{}
	if change.SegmentSize != nil {
		options["segment_size"] = *change.SegmentSize
	}
	for option, value := range map[string]*time.Duration{
		"retention_age": change.RetentionAge, "idempotency_ttl": change.IdempotencyTTL, "tombstone_ttl": change.TombstoneTTL,
	} {
		switch {
		case value == nil:
		case *value == 0 && option == "retention_age":
			options[option] = nil
		default:
			options[option] = intervalText(*value)
		}
	}
	if change.RetentionBytes != nil {
		options["retention_bytes"] = *change.RetentionBytes
		if *change.RetentionBytes == 0 {
			options["retention_bytes"] = nil
		}
	}
	if change.DropUnread != nil {
		options["drop_unread"] = *change.DropUnread
	}
	if change.Restricted != nil {
		options["restricted"] = *change.Restricted
	}
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	_, err = one[any](ctx, c, nil, "alter_topic", name, string(text))
	return wrap(err, "alter topic %q", name)
}

// RenameTopic gives a topic another name. Its log and groups stay; producers and consumers that use the old name end with
// ErrTopicNotFound. Errors: ErrTopicNotFound, ErrInvalid, ErrConflict.
func (c *Client) RenameTopic(ctx context.Context, name, newName string) error {
	err := checkName("new name", newName)
	if err == nil {
		_, err = one[any](ctx, c, nil, "rename_topic", name, newName)
	}
	c.topics.Delete(name)
	return wrap(err, "rename topic %q", name)
}

// DeleteKey removes all messages of a key from a topic, for good, and from the deliveries of its groups: for what the law wants gone.
// Groups that have yet to handle them do not get them. It reads the log as a whole, segment by segment; progress, if not nil, is
// called after each. It returns how many messages there were. Errors: ErrTopicNotFound, ErrInvalid.
func (c *Client) DeleteKey(ctx context.Context, topic, key string, progress func(segment int, deleted int64)) (deleted int64, err error) {
	for segment, more := 0, true; more; {
		more = false
		err := c.query(ctx, nil, "delete_key", []any{topic, key, segment}, func(rows pgx.Rows) error {
			more = true
			var n int64
			err := rows.Scan(&segment, &n)
			deleted += n
			return err
		})
		if err != nil {
			return deleted, wrap(err, "delete key from topic %q", topic)
		}
		if more && progress != nil {
			progress(segment, deleted)
		}
	}
	return deleted, nil
}

// DropTopic removes a topic with its messages, groups and dead letters, and reports whether there was one. The name is free at once;
// tables that are in use are removed later, by maintenance. Errors: ErrInUse.
func (c *Client) DropTopic(ctx context.Context, name string, o *DropOptions) (bool, error) {
	dropped, err := c.drop(ctx, "drop_topic", name, o != nil && o.Force)
	c.topics.Delete(name)
	return dropped, wrap(err, "drop topic %q", name)
}

// drop runs one of the statements that drop. Against a consumer that acknowledges and claims the server can find a deadlock, and
// ends one of the two; that one can be tried again.
func (c *Client) drop(ctx context.Context, statement string, args ...any) (dropped bool, err error) {
	for try := 1; ; try++ {
		dropped, err = one[bool](ctx, c, nil, statement, args...)
		if err == nil || !transient(err) || try == 10 || ctx.Err() != nil {
			return dropped, err
		}
		pause(ctx, jitter(time.Duration(try)*20*time.Millisecond))
	}
}

// Topics lists all topics by name.
func (c *Client) Topics(ctx context.Context) ([]Topic, error) { return c.topicList(ctx, nil) }

// Topic describes one topic. Errors: ErrTopicNotFound.
func (c *Client) Topic(ctx context.Context, name string) (Topic, error) {
	list, err := c.topicList(ctx, name)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%w: %q", ErrTopicNotFound, name)
	}
	if err != nil {
		return Topic{}, err
	}
	return list[0], nil
}

func (c *Client) topicList(ctx context.Context, name any) (list []Topic, err error) {
	err = c.query(ctx, nil, "topics", []any{name}, func(rows pgx.Rows) error {
		var (
			t   Topic
			age float64
		)
		err := rows.Scan(&t.Name, &t.Format, &t.Log, &t.Head, &t.Settled, &t.SegmentSize, &t.Segments, &t.Groups, &t.CreatedAt,
			&t.Messages, &t.Bytes, &t.OldestAt, &age, &t.RetentionBytes, &t.DropUnread, &t.Compact, &t.Restricted)
		t.RetentionAge = time.Duration(age * float64(time.Second))
		list = append(list, t)
		return err
	})
	return list, wrap(err, "list topics")
}

// checkName refuses what the server cannot even take as text; weir.check_name has the rest of the rules.
func checkName(field, name string) error {
	if !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
		return invalid(field, fmt.Sprintf("%q", name), "it must be valid UTF-8 without NUL")
	}
	return nil
}

// topicInfo is what a client keeps of a topic.
type topicInfo struct {
	id     int32
	format Format
	// canCopy: the client's role may COPY messages into the log; canCopyAll: also those that have more than key, headers and
	// payload.
	canCopy, canCopyAll bool
}

func (c *Client) topicInfo(ctx context.Context, q querier, name string) (topicInfo, error) {
	if t, ok := c.topics.Load(name); ok {
		return t.(topicInfo), nil
	}
	var t topicInfo
	err := c.query(ctx, q, "topic", []any{name}, func(rows pgx.Rows) error {
		return rows.Scan(&t.id, &t.format, &t.canCopy, &t.canCopyAll)
	})
	if err != nil {
		return t, err
	}
	if q == nil { // what a transaction sees may be rolled back
		c.topics.Store(name, t)
	}
	return t, nil
}

// topicInfoSQL asks a transaction of database/sql, which may have the pool's last connection.
func (c *Client) topicInfoSQL(ctx context.Context, tx SQLTx, name string) (t topicInfo, err error) {
	if t, ok := c.topics.Load(name); ok {
		return t.(topicInfo), nil
	}
	if !c.checked.Load() && !c.fits.Load() {
		var s installedSchema
		err := sqlRow(ctx, tx, c.text("version"), nil, &s.version, &s.compatible, &s.functions)
		if err == nil {
			err = s.check(c.schema)
		}
		if err != nil {
			return t, err
		}
		c.fits.Store(true)
	}
	return t, sqlRow(ctx, tx, c.text("topic"), []any{name}, &t.id, &t.format, &t.canCopy, &t.canCopyAll)
}

// sqlRow runs a query of one row.
func sqlRow(ctx context.Context, tx SQLTx, text string, args []any, into ...any) error {
	rows, err := tx.QueryContext(ctx, text, args...)
	if err != nil {
		return explain(err)
	}
	defer rows.Close()
	if rows.Next() {
		err = rows.Scan(into...)
	}
	return errors.Join(err, explain(rows.Err()))
}

func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
