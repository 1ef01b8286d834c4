package weir

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Mode is how a group hands messages out.
type Mode string

const (
	// Stream hands out ranges of messages, several at once. Success leaves no row behind: the fastest.
	Stream Mode = "stream"
	// Ordered hands out the messages of a key in id order and one at a time, across retries and processes. A message that fails,
	// or whose time has not come, makes its key wait; the others go on.
	Ordered Mode = "ordered"
	// Queue hands out every message by itself, by priority: for long and uneven jobs.
	Queue Mode = "queue"
)

// GroupOptions are the options of a new group. The zero value is ready to use.
type GroupOptions struct {
	// Mode is how messages are handed out. Default Stream.
	Mode Mode
	// Shards is how many shards an ordered group has: consumers take free shards, and a key belongs to one. A power of two, 1
	// to 256. Default 16.
	Shards int
	// KeyPrefix and Headers make a filter: only messages whose key begins so, and whose headers contain all of these, are handed
	// out. The others are passed over. Default: every message.
	KeyPrefix string
	Headers   map[string]string
	// Start is where a new group begins. Default Beginning().
	Start Position
	// MaxAttempts is how often a message is tried before it is dead, 1 to 1,000. Default 10.
	MaxAttempts int
	// RetryDelay is the time before the second attempt, doubled with each further one up to RetryMax, less up to half of it
	// at random. Default 1 s, negative: none. RetryMax: default 10 min or RetryDelay, whichever is longer; at most 30 days.
	RetryDelay, RetryMax time.Duration
	// SplitAfter is how often a range whose consumer died is taken over before its messages are given out one by one, 1 to
	// 1,000. Default 3; less where MaxAttempts leaves fewer attempts.
	SplitAfter int
}

// Group describes a group at one moment.
type Group struct {
	Topic   string `json:"topic"`
	Name    string `json:"group"`
	Mode    Mode   `json:"mode"`
	Head    int64  `json:"head"`
	Settled int64  `json:"settled"`
	// Claimed is the cursor: the highest id that was given out. Everything at or below Committed is handled, or has a
	// delivery of its own.
	Claimed   int64 `json:"claimed"`
	Committed int64 `json:"committed"`
	// Lag is the number of ids from Committed to Head, an upper bound of the messages still to be handled; LagSeconds the
	// age of the oldest of them.
	Lag        int64   `json:"lag"`
	LagSeconds float64 `json:"lag_seconds"`
	// Leases is the number of ranges, shards and single messages that consumers hold; Waiting that of messages with a delivery of
	// their own before their first attempt (of a queue group, delayed, or behind an earlier one of their key), Retrying that
	// of messages between two attempts, Dead that of dead letters.
	Leases      int `json:"leases"`
	Waiting     int `json:"waiting"`
	Retrying    int `json:"retrying"`
	Dead        int `json:"dead"`
	MaxAttempts int `json:"max_attempts"`
	// Shards is 0 but for an ordered group.
	Shards int `json:"shards,omitempty"`
	// PausedAt is when the group was paused, nil while it is not.
	PausedAt  *time.Time        `json:"paused_at,omitempty"`
	KeyPrefix string            `json:"key_prefix,omitempty"`
	Headers   map[string]string `json:"headers,omitempty"`
	CreatedAt time.Time         `json:"created_at"`
	// Missed is how many messages retention removed before the group had finished them, where the topic allows that.
	Missed int64 `json:"missed,omitempty"`
}

// CreateGroup creates a consumer group on a topic. One of that name that exists is left as it is, so that any number of
// processes may call it at once. Names are as for topics. Errors: ErrTopicNotFound, ErrInvalid, ErrConflict.
func (c *Client) CreateGroup(ctx context.Context, topic, group string, o *GroupOptions) error {
	if err := checkName("group", group); err != nil {
		return wrap(err, "create group %q on topic %q", group, topic)
	}
	if o == nil {
		o = &GroupOptions{}
	}
	options := map[string]any{"start": o.Start}
	if o.Mode != "" {
		options["mode"] = o.Mode
	}
	if o.Shards != 0 {
		options["shards"] = o.Shards
	}
	if o.KeyPrefix != "" {
		options["key_prefix"] = o.KeyPrefix
	}
	if len(o.Headers) > 0 {
		options["headers"] = o.Headers
	}
	o.retries(options)
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	_, err = one[int64](ctx, c, nil, "create_group", topic, group, string(text))
	return wrap(err, "create group %q on topic %q", group, topic)
}

// retries adds the options of retries that are given.
func (o *GroupOptions) retries(options map[string]any) {
	if o.MaxAttempts != 0 {
		options["max_attempts"] = o.MaxAttempts
	}
	if o.SplitAfter != 0 {
		options["split_after"] = o.SplitAfter
	}
	if o.RetryDelay != 0 {
		options["retry_delay"] = fmt.Sprintf("%.6f s", max(o.RetryDelay, 0).Seconds())
	}
	if o.RetryMax != 0 {
		options["retry_max"] = fmt.Sprintf("%.6f s", o.RetryMax.Seconds())
	}
}

// GroupChange is what AlterGroup changes. What is zero stays as it is.
type GroupChange struct {
	// Shards, KeyPrefix and Headers can be changed while the group is paused and no consumer holds a lease of it.
	Shards int
	// KeyPrefix and Headers replace the group's filter; empty for none. They count for what is claimed from then on.
	KeyPrefix *string
	Headers   *map[string]string
	// MaxAttempts, RetryDelay, RetryMax and SplitAfter are as in GroupOptions.
	MaxAttempts          int
	RetryDelay, RetryMax time.Duration
	SplitAfter           int
}

// AlterGroup changes options of a group. Errors: ErrTopicNotFound, ErrGroupNotFound, ErrInvalid, ErrInUse (Shards, KeyPrefix and
// Headers, while the group is not paused or a consumer holds a lease).
func (c *Client) AlterGroup(ctx context.Context, topic, group string, change GroupChange) error {
	options := map[string]any{}
	if change.Shards != 0 {
		options["shards"] = change.Shards
	}
	if change.KeyPrefix != nil {
		options["key_prefix"] = *change.KeyPrefix
	}
	if change.Headers != nil {
		options["headers"] = *change.Headers
	}
	o := GroupOptions{
		MaxAttempts: change.MaxAttempts, RetryDelay: change.RetryDelay, RetryMax: change.RetryMax, SplitAfter: change.SplitAfter,
	}
	o.retries(options)
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	_, err = one[any](ctx, c, nil, "alter_group", topic, group, string(text))
	return wrap(err, "alter group %q of topic %q", group, topic)
}

// PauseGroup has nothing of a group handed out any more, and reports whether that is new. What consumers hold they finish and
// acknowledge. Errors: ErrTopicNotFound, ErrGroupNotFound.
func (c *Client) PauseGroup(ctx context.Context, topic, group string) (bool, error) {
	changed, err := one[bool](ctx, c, nil, "pause_group", topic, group)
	return changed, wrap(err, "pause group %q of topic %q", group, topic)
}

// ResumeGroup ends a pause, and reports whether there was one. Errors: ErrTopicNotFound, ErrGroupNotFound.
func (c *Client) ResumeGroup(ctx context.Context, topic, group string) (bool, error) {
	changed, err := one[bool](ctx, c, nil, "resume_group", topic, group)
	if changed {
		c.Wake(topic)
	}
	return changed, wrap(err, "resume group %q of topic %q", group, topic)
}

// RenameGroup gives a group another name. Its position, leases and deliveries stay; consumers that run under the old name end with
// ErrGroupNotFound. Errors: ErrTopicNotFound, ErrGroupNotFound, ErrInvalid, ErrConflict.
func (c *Client) RenameGroup(ctx context.Context, topic, group, newName string) error {
	err := checkName("new name", newName)
	if err == nil {
		_, err = one[any](ctx, c, nil, "rename_group", topic, group, newName)
	}
	return wrap(err, "rename group %q of topic %q", group, topic)
}

// DropGroup removes a group with its retries and dead letters, and reports whether there was one. Errors: ErrTopicNotFound, ErrInUse.
func (c *Client) DropGroup(ctx context.Context, topic, group string, o *DropOptions) (bool, error) {
	dropped, err := c.drop(ctx, "drop_group", topic, group, o != nil && o.Force)
	return dropped, wrap(err, "drop group %q of topic %q", group, topic)
}

// Groups lists the groups of a topic, or all for topic "".
func (c *Client) Groups(ctx context.Context, topic string) ([]Group, error) {
	return c.groupList(ctx, null(topic), nil)
}

// Group describes one group. Errors: ErrGroupNotFound.
func (c *Client) Group(ctx context.Context, topic, group string) (Group, error) {
	list, err := c.groupList(ctx, topic, group)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%w: %q on topic %q", ErrGroupNotFound, group, topic)
	}
	if err != nil {
		return Group{}, err
	}
	return list[0], nil
}

func (c *Client) groupList(ctx context.Context, topic, group any) (list []Group, err error) {
	err = c.query(ctx, nil, "groups", []any{topic, group}, func(rows pgx.Rows) error {
		var (
			g       Group
			headers *string
		)
		err := rows.Scan(&g.Topic, &g.Name, &g.Mode, &g.Head, &g.Settled, &g.Claimed, &g.Committed, &g.Lag, &g.LagSeconds,
			&g.Leases, &g.Waiting, &g.Retrying, &g.Dead, &g.MaxAttempts, &g.Shards, &g.PausedAt, &g.KeyPrefix, &headers, &g.CreatedAt, &g.Missed)
		if headers != nil {
			g.Headers = readHeaders(*headers)
		}
		list = append(list, g)
		return err
	})
	return list, wrap(err, "list groups")
}

// Seek moves a group to a position and returns where it was. All that is held ends at once: running handlers finish and their
// acknowledgements are refused. Messages up to the new position that wait for another attempt or for their time still get
// it; those above it come again from the log. Dead letters stay. Errors: ErrTopicNotFound,
// ErrGroupNotFound, ErrInvalid.
func (c *Client) Seek(ctx context.Context, topic, group string, to Position) (was int64, err error) {
	text, err := json.Marshal(to)
	if err != nil {
		return 0, err
	}
	was, err = one[int64](ctx, c, nil, "seek", topic, group, string(text))
	return was, wrap(err, "seek group %q of topic %q", group, topic)
}

// null is nil for an empty string.
func null(s string) any {
	if s == "" {
		return nil
	}
	return s
}
