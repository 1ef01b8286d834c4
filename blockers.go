package weir

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Blocker is a transaction that has produced to a topic and is not finished, while later messages wait behind it: groups
// are not given a message before it is certain that no lower id can still appear.
type Blocker struct {
	Topic string `json:"topic"`
	// PID is the server process; 0 for a prepared transaction, whose GID is set.
	PID int32  `json:"pid,omitempty"`
	GID string `json:"gid,omitempty"`
	// Age is that of the transaction.
	Age         time.Duration `json:"age_ns"`
	State       string        `json:"state"`
	Application string        `json:"application"`
	// Query is its last statement. Another role's is shown to members of pg_read_all_stats only.
	Query string `json:"query"`
	// Waiting is how many ids are behind it, at most.
	Waiting int64 `json:"waiting"`
}

// Blockers lists what keeps the settled head of a topic, or of all for "", below its head; the oldest first.
//
// End one with pg_terminate_backend(pid) or rollback prepared, if its program does not.
func (c *Client) Blockers(ctx context.Context, topic string) (list []Blocker, err error) {
	err = c.query(ctx, nil, "blockers", []any{null(topic)}, func(rows pgx.Rows) error {
		var b Blocker
		var seconds float64
		err := rows.Scan(&b.Topic, &b.PID, &b.GID, &seconds, &b.State, &b.Application, &b.Query, &b.Waiting)
		b.Age = time.Duration(seconds * float64(time.Second))
		list = append(list, b)
		return err
	})
	return list, wrap(err, "list blockers")
}

// warnBlocked logs what holds up the consumer's topic.
func (r *run) warnBlocked(since time.Time) {
	call, cancel := context.WithTimeout(r.base, callTimeout)
	defer cancel()
	list, err := r.c.Blockers(call, r.k.topic)
	if err != nil {
		r.log("messages wait for a transaction that cannot be named", logError, err, logAge, time.Since(since))
		return
	}
	for _, b := range list {
		r.log("messages wait for an open transaction that produced before them", logPID, b.PID, logGID, b.GID,
			logAge, b.Age.Round(time.Millisecond), logState, b.State, logApplication, b.Application, logQuery, b.Query, logCount, b.Waiting)
	}
}
