package weir

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// producer is what the server knows a repeated batch by: a name of its own, and the number of its last batch (weir.producer).
// One call has it at a time, so that its batches come one after the other.
type producer struct {
	id    string
	batch int64
}

// producers are those of a client that no call has. There are about as many as connections: a call takes one when it has
// something to send it through.
type producers struct {
	mu   sync.Mutex
	free []*producer
}

// take gives a producer, with the number of its next batch. One whose batch may still be under way when the call ends is not
// put back: the next number would overtake it.
func (s *producers) take() *producer {
	s.mu.Lock()
	defer s.mu.Unlock()
	var p *producer
	if last := len(s.free) - 1; last >= 0 {
		p, s.free = s.free[last], s.free[:last]
	} else {
		var id [16]byte
		rand.Read(id[:]) // never fails
		p = &producer{id: fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])}
	}
	p.batch++
	return p
}

// put takes a producer back. nil is none.
func (s *producers) put(p *producer) {
	if p == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, p)
}

// retry paces the attempts of one call.
type retry struct {
	until time.Time
	wait  time.Duration
}

func (c *Client) newRetry() *retry {
	return &retry{until: time.Now().Add(c.produceRetry), wait: 10 * time.Millisecond}
}

// again waits before the next attempt, and reports whether there is to be one.
func (r *retry) again(ctx context.Context) bool {
	if ctx.Err() != nil || !time.Now().Before(r.until) {
		return false
	}
	pause(ctx, min(jitter(r.wait), time.Until(r.until)))
	r.wait = min(2*r.wait, time.Second)
	return ctx.Err() == nil
}

// produceOwn produces in a transaction of its own, and again after a failure, as the same batch: the server stores it once.
func (c *Client) produceOwn(ctx context.Context, topic string, messages []Message) ([]Produced, error) {
	tries := c.newRetry()
	info, err := c.topicInfo(ctx, nil, topic)
	for err != nil && (transient(err) || disconnected(err)) && tries.again(ctx) {
		info, err = c.topicInfo(ctx, nil, topic)
	}
	if err != nil {
		return nil, wrap(ended(ctx, err), "produce to topic %q", topic)
	}
	b, err := encode(info.format, messages)
	if err != nil || len(messages) == 0 {
		return nil, c.failed(topic, b, err)
	}
	return c.produceBatch(ctx, topic, b)
}

// produceBatch sends a batch until it is stored or refused.
func (c *Client) produceBatch(ctx context.Context, topic string, b *batch) ([]Produced, error) {
	tries := c.newRetry()
	var (
		p *producer
		// an attempt may have been carried out, or may yet be
		unknown bool
	)
	for {
		produced, lost, err := c.attempt(ctx, &p, topic, b)
		if err == nil {
			c.producers.put(p)
			return produced, nil
		}
		unknown = unknown || lost
		if !lost && !transient(err) && !disconnected(err) {
			// Refused. An attempt before may still be on its way, and not be.
			stored := false
			if unknown {
				if stored, unknown = c.closed(ctx, p, tries); stored {
					continue // for its ids
				}
			}
			if !unknown {
				c.producers.put(p)
				return nil, c.failed(topic, b, err)
			}
		}
		if !tries.again(ctx) {
			err = ended(ctx, err)
			if unknown {
				return nil, wrap(fmt.Errorf("%w: %w", ErrUnknownOutcome, err), "produce to topic %q", topic)
			}
			c.producers.put(p)
			return nil, c.failed(topic, b, err)
		}
	}
}

// attempt sends a batch. lost: no answer came, though it may have been carried out.
func (c *Client) attempt(ctx context.Context, p **producer, topic string, b *batch) (produced []Produced, lost bool, err error) {
	if err := c.ready(ctx, nil); err != nil {
		return nil, false, err
	}
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return nil, false, explain(err)
	}
	defer conn.Release()
	if *p == nil {
		*p = c.producers.take()
	}
	if c.readCommitted {
		err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
			produced, err = c.send(ctx, tx, topic, b, *p)
			return err
		})
	} else {
		produced, err = c.send(ctx, conn, topic, b, *p)
	}
	return produced, unanswered(conn.Conn(), err), err
}

// closed finds out whether a batch was stored that may still be under way, and sees to it that it is not stored any more if
// not. unknown: the server could not be asked.
func (c *Client) closed(ctx context.Context, p *producer, tries *retry) (stored, unknown bool) {
	for {
		stored, err := one[bool](ctx, c, nil, "close_batch", p.id, p.batch)
		if err == nil {
			return stored, false
		}
		if !transient(err) && !disconnected(err) || !tries.again(ctx) {
			return false, true
		}
	}
}

// copyOwn copies in a transaction of its own. lost: no answer came to the commit of p's batch.
func (c *Client) copyOwn(ctx context.Context, topic string, messages messageSeq) (stored int64, p *producer, lost bool, err error) {
	pooled, err := c.pool.Acquire(ctx)
	if err != nil {
		return 0, nil, false, err
	}
	defer pooled.Release()
	conn := pooled.Conn()
	if _, err := conn.Exec(ctx, "begin isolation level read committed"); err != nil {
		return 0, nil, false, err
	}
	defer func() {
		if err != nil && !conn.IsClosed() {
			_, _ = conn.Exec(ctx, "rollback") // where this fails the pool closes the connection, which does the same
		}
	}()
	if stored, err = c.copyInto(ctx, conn, topic, messages); err != nil {
		return 0, nil, false, err
	}
	// One message has both, so that the producer's lock is not held while the commit is on its way: whoever asks for the
	// outcome would wait for a commit that never comes. If it comes after the question, the batch is closed and the commit
	// is not carried out.
	p = c.producers.take()
	var last pgx.Batch
	last.Queue(c.text("record_batch"), p.id, p.batch)
	last.Queue("commit")
	if err = conn.SendBatch(ctx, &last).Close(); err != nil {
		return stored, p, unanswered(conn, err), explain(err)
	}
	c.producers.put(p)
	return stored, p, false, nil
}

// unanswered reports whether a statement that failed so may have been carried out nevertheless. A FATAL error is no answer: a
// server that is stopped sends it after the commit too.
func unanswered(conn *pgx.Conn, err error) bool {
	var pg *pgconn.PgError
	if err == nil || errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" {
		return false
	}
	return conn.IsClosed() && !pgconn.SafeToRetry(err)
}

// disconnected reports whether an error is that of a connection.
func disconnected(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// ended adds to an error that the context has ended, which may be why there was no further attempt.
func ended(ctx context.Context, err error) error {
	if ctx.Err() == nil || errors.Is(err, ctx.Err()) {
		return err
	}
	return fmt.Errorf("%w (last: %w)", context.Cause(ctx), err)
}
