package weir

import (
	"context"
	"encoding/json"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
)

// ConsumerInfo describes a consumer of a group: one that runs, or that holds something.
type ConsumerInfo struct {
	Topic string `json:"topic"`
	Group string `json:"group"`
	Name  string `json:"consumer"`
	// StartedAt is nil for a program that calls the SQL functions and has not said that it is there.
	StartedAt *time.Time `json:"started_at,omitempty"`
	// LastSeen is now while the connection is open on which the consumer's process listens, else when it last renewed a lease.
	LastSeen *time.Time `json:"last_seen,omitempty"`
	// Leases is how many ranges, shards and single messages it holds, Messages at most how many messages in them, Oldest when the
	// oldest range or shard was claimed, nil where it holds single messages alone.
	Leases   int64      `json:"leases"`
	Messages int64      `json:"messages"`
	Oldest   *time.Time `json:"oldest,omitempty"`
	// Host, PID and Concurrency are what the consumer said of itself.
	Host        string `json:"host,omitempty"`
	PID         int    `json:"pid,omitempty"`
	Concurrency int    `json:"concurrency,omitempty"`
}

// Consumers lists the consumers of a group, of all groups of a topic for group "", or of all topics for topic "" too. A process that
// died is listed, with the time it was last seen, until another consumer of the group starts an hour later or more.
func (c *Client) Consumers(ctx context.Context, topic, group string) (list []ConsumerInfo, err error) {
	err = c.query(ctx, nil, "consumers", []any{null(topic), null(group)}, func(rows pgx.Rows) error {
		var (
			i     ConsumerInfo
			about string
		)
		err := rows.Scan(&i.Topic, &i.Group, &i.Name, &i.StartedAt, &i.LastSeen, &i.Leases, &i.Messages, &i.Oldest, &about)
		if err == nil {
			err = json.Unmarshal([]byte(about), &i)
		}
		list = append(list, i)
		return err
	})
	return list, wrap(err, "list consumers")
}

// present notes that the consumer runs, once and whenever its client listens on another connection: an idle consumer writes nothing.
func (r *run) present() {
	host, _ := os.Hostname()
	about, _ := json.Marshal(map[string]any{"host": host, "pid": os.Getpid(), "concurrency": r.k.o.Concurrency})
	noted := int64(-1)
	for wait := 200 * time.Millisecond; r.base.Err() == nil; wait = time.Second {
		backend := r.c.waker.backend.Load()
		if r.c.listen && backend == 0 && noted < 0 && wait < time.Second {
			pause(r.base, wait) // it is about to listen
			continue
		}
		if backend == noted {
			pause(r.base, wait)
			continue
		}
		var pid any
		if backend != 0 {
			pid = backend
		}
		call, cancel := context.WithTimeout(r.base, callTimeout)
		_, err := one[any](call, r.c, nil, "consumer_here", r.k.topic, r.k.group, r.k.o.Name, pid, string(about))
		cancel()
		if err == nil {
			noted = backend
		}
		pause(r.base, wait)
	}
}

// absent notes that the consumer has stopped.
func (r *run) absent() {
	call, cancel := context.WithTimeout(r.base, time.Second)
	defer cancel()
	if _, err := one[any](call, r.c, nil, "consumer_gone", r.k.topic, r.k.group, r.k.o.Name); err != nil {
		r.c.log.Debug("cannot note that a consumer has stopped", logConsumer, r.k.o.Name, logError, err)
	}
}
