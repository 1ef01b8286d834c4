package demo

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const naiveEvery = 20 * time.Millisecond

// naive is a reader that does what looks right: it asks for what comes after the highest id that it has seen. A transaction
// that drew a lower id and commits later is never seen.
type naive struct {
	mu     sync.Mutex
	cursor int64
	seen   []int64 // rising

	// The picture's count, up to an id below which nothing can appear any more.
	counted int64
	index   int
	skipped int64
}

func (n *naive) read(ctx context.Context, d *demo) {
	for ctx.Err() == nil {
		rows, err := d.pool.Query(ctx, d.text("naive"), n.at())
		var ids []int64
		if err == nil {
			ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		}
		if err == nil && len(ids) > 0 {
			n.mu.Lock()
			n.seen = append(n.seen, ids...)
			n.cursor = ids[len(ids)-1]
			n.mu.Unlock()
		}
		if err != nil || len(ids) < 1000 {
			pause(ctx, naiveEvery)
		}
	}
}

func (n *naive) at() int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cursor
}

// count says how many messages the reader has skipped so far: of those up to the settled head and its cursor.
func (n *naive) count(ctx context.Context, d *demo, settled int64) int64 {
	n.mu.Lock()
	low, high := n.counted, min(settled, n.cursor)
	first := n.index
	last := first
	for last < len(n.seen) && n.seen[last] <= high {
		last++
	}
	n.mu.Unlock()
	var there int64
	if high > low && d.pool.QueryRow(ctx, d.text("count"), low, high).Scan(&there) == nil {
		n.skipped += there - int64(last-first)
		n.counted, n.index = high, last
	}
	return n.skipped
}
