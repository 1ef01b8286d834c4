package weir

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// GroupOptions are the options of a new group. The zero value is ready to use.
type GroupOptions struct {
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
	Mode    string `json:"mode"`
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
	// Leases is the number of ranges that consumers hold, Retrying that of messages between two attempts, Dead that of dead
	// letters.
	Leases      int       `json:"leases"`
	Retrying    int       `json:"retrying"`
	Dead        int       `json:"dead"`
	MaxAttempts int       `json:"max_attempts"`
	CreatedAt   time.Time `json:"created_at"`
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
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	_, err = one[int64](ctx, c, nil, "create_group", topic, group, string(text))
	return wrap(err, "create group %q on topic %q", group, topic)
}

// DropGroup removes a group with its retries and dead letters, and reports whether there was one. Its running consumers end
// with ErrGroupNotFound. Errors: ErrTopicNotFound.
func (c *Client) DropGroup(ctx context.Context, topic, group string) (bool, error) {
	dropped, err := one[bool](ctx, c, nil, "drop_group", topic, group)
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
		var g Group
		err := rows.Scan(&g.Topic, &g.Name, &g.Mode, &g.Head, &g.Settled, &g.Claimed, &g.Committed, &g.Lag, &g.LagSeconds,
			&g.Leases, &g.Retrying, &g.Dead, &g.MaxAttempts, &g.CreatedAt)
		list = append(list, g)
		return err
	})
	return list, wrap(err, "list groups")
}

// Seek moves a group to a position and returns where it was. Ranges that are held end at once: running handlers finish and
// their acknowledgements are refused. Messages between two attempts and dead letters stay. Errors: ErrTopicNotFound,
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
