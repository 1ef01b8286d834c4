package weir

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// maintainEvery is how often a client looks whether upkeep is due; it takes a read-only statement.
	maintainEvery = 30 * time.Second
	// maintainAtOnce bounds what one round does before it pauses.
	maintainAtOnce = 100
)

// Upkeep is one piece of maintenance that was done.
type Upkeep struct {
	// Topic is "" where it concerns none, or several.
	Topic string `json:"topic,omitempty"`
	// Action is sealed, rolled, extended, emptied, dropped, compacted, rewritten, expired, squeezed or analyzed; or postponed, when
	// a lock was not to be had within a moment and nothing else is due.
	Action string `json:"action"`
	Detail string `json:"detail,omitempty"`
}

// Maintain does one piece of the upkeep that is due, in a transaction of its own, and reports whether there was any: segments are made
// ahead and removed by retention, topics compacted, what is past its time forgotten. Every client does so by itself, unless
// Options.NoMaintenance; one at a time in the whole install.
func (c *Client) Maintain(ctx context.Context) (done Upkeep, any bool, err error) {
	err = c.query(ctx, nil, "maintain", nil, func(rows pgx.Rows) error {
		any = true
		return rows.Scan(&done.Topic, &done.Action, &done.Detail)
	})
	return done, any, wrap(err, "maintain")
}

// SuspendMaintenance stops the upkeep by all processes, or lets it go on, and reports whether that is new.
func (c *Client) SuspendMaintenance(ctx context.Context, suspend bool) (bool, error) {
	changed, err := one[bool](ctx, c, nil, "suspend_maintenance", suspend)
	return changed, wrap(err, "suspend maintenance")
}

// MaintenanceSuspended tells since when maintenance is suspended; nil when it is not.
func (c *Client) MaintenanceSuspended(ctx context.Context) (*time.Time, error) {
	since, err := one[*time.Time](ctx, c, nil, "maintenance")
	return since, wrap(err, "maintenance")
}

// maintain does the upkeep of the install until ctx ends.
func (c *Client) maintain(ctx context.Context) {
	// Processes that start together do not look together.
	pause(ctx, time.Duration(rand.Int64N(int64(maintainEvery))))
	for ctx.Err() == nil {
		wait := jitter(2 * maintainEvery)
		for range maintainAtOnce {
			call, cancel := context.WithTimeout(ctx, time.Minute)
			done, any, err := c.Maintain(call)
			cancel()
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				// Consumers and producers say louder that the server cannot be reached.
				c.log.Debug("maintenance failed, it is tried again", logError, err)
				break
			}
			if !any {
				break
			}
			if done.Action == "squeezed" {
				// The snapshot is still there, and what it keeps grows on.
				wait = jitter(10 * time.Second)
				break
			}
			if done.Action == "postponed" {
				wait = jitter(2 * time.Second)
				break
			}
			c.log.Debug("maintenance", logTopic, done.Topic, logAction, done.Action, logDetail, done.Detail)
			wait = 0
		}
		pause(ctx, max(wait, 10*time.Millisecond))
	}
}
