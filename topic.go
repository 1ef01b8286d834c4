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
	}
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	_, err = one[int32](ctx, c, nil, "create_topic", name, string(text))
	return wrap(err, "create topic %q", name)
}

// DropTopic removes a topic with its messages, groups and dead letters, and reports whether there was one. It waits for
// transactions that use the log.
func (c *Client) DropTopic(ctx context.Context, name string) (bool, error) {
	dropped, err := one[bool](ctx, c, nil, "drop_topic", name)
	c.topics.Delete(name)
	return dropped, wrap(err, "drop topic %q", name)
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
		var t Topic
		err := rows.Scan(&t.Name, &t.Format, &t.Log, &t.Head, &t.Settled, &t.SegmentSize, &t.Segments, &t.Groups, &t.CreatedAt)
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
	id      int32
	format  Format
	canCopy bool
}

func (c *Client) topicInfo(ctx context.Context, q querier, name string) (topicInfo, error) {
	if t, ok := c.topics.Load(name); ok {
		return t.(topicInfo), nil
	}
	var t topicInfo
	err := c.query(ctx, q, "topic", []any{name}, func(rows pgx.Rows) error {
		return rows.Scan(&t.id, &t.format, &t.canCopy)
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
	return t, sqlRow(ctx, tx, c.text("topic"), []any{name}, &t.id, &t.format, &t.canCopy)
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
