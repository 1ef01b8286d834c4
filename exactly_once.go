package weir

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// HandleTx makes a Handler that takes one message at a time, with the transaction in which it is acknowledged: what the handler writes
// there and the progress of the group are committed together or not at all. So each message has exactly one committed
// effect, whatever dies when; a message that is handed out again finds that effect, and that of the former holder is
// refused at its commit.
//
// The transaction is one of the client's pool at READ COMMITTED. The handler must not end it, nor use it after it has returned. At
// most one less than the pool's connections run at once, however high ConsumerOptions.Concurrency is. Errors, panics and
// limits: as for Handle; the transaction is rolled back.
func HandleTx[T any](handle func(ctx context.Context, tx pgx.Tx, message *Received[T]) error) Handler {
	return Handler{pooled: true, run: func(ctx context.Context, s *session, messages []*raw) []error {
		return handleIn(ctx, s.pgx, messages[0], handle)
	}}
}

// HandleSQL is HandleTx with a transaction of database/sql: one of db, which must be of the same database as the client.
func HandleSQL[T any](db *sql.DB, handle func(ctx context.Context, tx *sql.Tx, message *Received[T]) error) Handler {
	return Handler{run: func(ctx context.Context, s *session, messages []*raw) []error {
		return handleIn(ctx, s.sql(db), messages[0], handle)
	}}
}

// HandleBatchTx is HandleTx for up to ConsumerOptions.BatchSize messages at a time. Where a *BatchError names some that failed, the
// transaction is rolled back and the handler is called again without them.
func HandleBatchTx[T any](handle func(ctx context.Context, tx pgx.Tx, messages []*Received[T]) error) Handler {
	return Handler{batch: true, pooled: true, run: func(ctx context.Context, s *session, messages []*raw) []error {
		return handleBatchIn(ctx, s.pgx, messages, handle)
	}}
}

// HandleBatchSQL is HandleBatchTx with a transaction of database/sql.
func HandleBatchSQL[T any](db *sql.DB, handle func(ctx context.Context, tx *sql.Tx, messages []*Received[T]) error) Handler {
	return Handler{batch: true, run: func(ctx context.Context, s *session, messages []*raw) []error {
		return handleBatchIn(ctx, s.sql(db), messages, handle)
	}}
}

// transact runs do in a transaction, acknowledges messages in it and commits.
type transact[X any] func(ctx context.Context, messages []*raw, do func(tx X) error) error

func handleIn[X, T any](ctx context.Context, in transact[X], m *raw, handle func(context.Context, X, *Received[T]) error) []error {
	message, err := decode[T](m)
	if err == nil {
		err = in(ctx, []*raw{m}, func(tx X) error { return handle(ctx, tx, message) })
	}
	return []error{err}
}

func handleBatchIn[X, T any](
	ctx context.Context, in transact[X], messages []*raw, handle func(context.Context, X, []*Received[T]) error,
) []error {
	errs := make([]error, len(messages))
	for {
		var (
			left    []*raw
			decoded []*Received[T]
			at      []int
		)
		for i, m := range messages {
			if errs[i] != nil {
				continue
			}
			message, err := decode[T](m)
			if err != nil {
				errs[i] = err
				continue
			}
			left, decoded, at = append(left, m), append(decoded, message), append(at, i)
		}
		if len(left) == 0 {
			return errs
		}
		err := in(ctx, left, func(tx X) error { return handle(ctx, tx, decoded) })
		var some *BatchError
		if !errors.As(err, &some) {
			for _, i := range at {
				errs[i] = err
			}
			return errs
		}
		named := false
		for k, i := range at {
			if some.Failed[k] != nil {
				errs[i], named = some.Failed[k], true
			}
		}
		if !named { // an error that names nobody would be asked again for ever
			for _, i := range at {
				errs[i] = err
			}
			return errs
		}
	}
}

// errNotHeld is the error of a message whose lease was lost before its handler's transaction could be committed.
var errNotHeld = fmt.Errorf("%w: the handler's transaction was rolled back", ErrLeaseLost)

// session is what an execution offers its handler.
type session struct {
	r *run
	e *execution
}

// pgx is a transact with a connection of the client's pool.
func (s *session) pgx(ctx context.Context, messages []*raw, do func(tx pgx.Tx) error) error {
	// One connection is left for polls and renewals, or all leases would run out behind slow handlers.
	select {
	case s.r.c.handlers <- struct{}{}:
		defer func() { <-s.r.c.handlers }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	tx, err := s.r.c.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		_ = tx.Rollback(end)
	}()
	if err := do(tx); err != nil {
		return err
	}
	return s.acknowledge(messages, func(text string, args ...any) (held *bool, err error) {
		err = tx.QueryRow(ctx, text, args...).Scan(&held)
		return held, err
	}, func() error { return tx.Commit(ctx) })
}

// sql is a transact with a connection of db.
func (s *session) sql(db *sql.DB) transact[*sql.Tx] {
	return func(ctx context.Context, messages []*raw, do func(tx *sql.Tx) error) error {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := do(tx); err != nil {
			return err
		}
		return s.acknowledge(messages, func(text string, args ...any) (held *bool, err error) {
			err = tx.QueryRowContext(ctx, text, args...).Scan(&held)
			return held, err
		}, tx.Commit)
	}
}

// acknowledge acknowledges messages by query, in a transaction, and commits it. Where they were acknowledged before (a commit whose
// outcome did not arrive), it does not commit: their effects are there.
func (s *session) acknowledge(
	messages []*raw, query func(text string, args ...any) (held *bool, err error), commit func() error,
) error {
	type part struct {
		lease  *lease
		ids    []int64
		upto   *int64
		unsure bool
		whole  bool
	}
	r := s.r
	var parts []*part
	r.mu.Lock()
	for _, m := range messages {
		i := slices.IndexFunc(s.e.items, func(it *item) bool { return it.message == m })
		it := s.e.items[i]
		l := it.lease
		if l.lost {
			r.mu.Unlock()
			return errNotHeld
		}
		if i = slices.IndexFunc(parts, func(p *part) bool { return p.lease == l }); i < 0 {
			i, parts = len(parts), append(parts, &part{lease: l})
		}
		parts[i].ids = append(parts[i].ids, m.ID)
		parts[i].unsure = parts[i].unsure || it.unsure
	}
	for _, p := range parts {
		l := p.lease
		// To end the lease would not tell whether they were acknowledged before.
		p.whole = l.open == len(p.ids) && !p.unsure
		l.ending = l.ending || p.whole
		for _, it := range l.items[l.prefix:] {
			if !it.done && !slices.Contains(p.ids, it.message.ID) {
				break
			}
			p.upto = &it.message.ID
		}
	}
	r.mu.Unlock()
	// In one order for everyone, the keeper's too: these rows stay locked until the commit.
	slices.SortFunc(parts, func(a, b *part) int { return cmp.Compare(a.lease.id, b.lease.id) })
	committed, unsure := false, false
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, p := range parts {
			if unsure {
				for _, it := range p.lease.items {
					it.unsure = it.unsure || slices.Contains(p.ids, it.message.ID)
				}
			}
			switch {
			case !p.whole:
			case committed:
				p.lease.ended = true
			default:
				p.lease.ending = false
			}
		}
	}()
	before := 0
	for _, p := range parts {
		var (
			held *bool
			err  error
		)
		if p.whole {
			held, err = query(r.c.text("ack"), p.lease.id, r.k.o.Name)
		} else {
			held, err = query(r.c.text("ack_messages"), p.lease.id, r.k.o.Name, idList(p.ids), p.upto)
		}
		switch {
		case err != nil:
			return explain(err)
		case held == nil:
			before++
		case !*held:
			r.mu.Lock()
			r.lose(p.lease)
			r.mu.Unlock()
			return errNotHeld
		}
	}
	if before == len(parts) {
		return nil
	} else if before > 0 {
		return errNotHeld
	}
	err := commit()
	committed, unsure = err == nil, err != nil
	return err
}

// idList is an array of ids as the server reads it from text, which any driver can send.
func idList(ids []int64) string {
	text := []byte{'{'}
	for i, id := range ids {
		if i > 0 {
			text = append(text, ',')
		}
		text = strconv.AppendInt(text, id, 10)
	}
	return string(append(text, '}'))
}
