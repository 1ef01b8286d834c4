package weir_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// TestRestrictedTopic: EXECUTE alone neither produces to a restricted topic nor reads it, whichever way; a right on its log does, to the
// role that logged in or that of SET ROLE, also by way of another role; and other topics are as they were.
func TestRestrictedTopic(t *testing.T) {
	t.Parallel()
	c, dsn := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), nil)
	ctx := t.Context()
	admin := connect(t, dsn)
	topicAndGroup(t, c, "open", "g", nil, nil)
	for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
		topicAndGroup(t, c, "closed", string(mode), &weir.TopicOptions{Restricted: true}, &weir.GroupOptions{Mode: mode})
	}
	noError(t, c.CreateTopic(ctx, "latest", &weir.TopicOptions{Compact: true, Restricted: true}))
	noError(t, c.CreateTopic(ctx, "blobs", &weir.TopicOptions{Format: weir.Bytes, Restricted: true}))
	produced(t, c, "closed", numbers(3)...) // the owner may
	execute(t, admin, `create role writers; create role readers; create role clerk login; create role guest login;
		grant usage on schema weir to clerk, guest;
		grant execute on all functions in schema weir to clerk, guest`)

	as := func(login bool, role string) *weir.Client {
		where := dsn
		if login {
			u, err := url.Parse(dsn)
			noError(t, err)
			u.User = url.User(role)
			where = u.String()
		}
		pool := newPool(t, where, func(config *pgxpool.Config) {
			if !login {
				config.ConnConfig.RuntimeParams["role"] = role
			}
		})
		own, err := weir.New(pool, &weir.Options{Logger: newTestLog(t).Logger, NoMaintenance: true})
		noError(t, err)
		t.Cleanup(own.Close)
		return own
	}
	refused := func(what string, err error) {
		t.Helper()
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" || !strings.Contains(pg.Hint, "on weir.log_") {
			t.Errorf("%s: error is %v, want a privilege that is missing, and the grant", what, err)
		}
	}
	take := func(c *weir.Client, group string) error {
		call, cancel := context.WithCancel(ctx)
		defer cancel()
		k, err := c.NewConsumer("closed", group, weir.Handle(func(context.Context, *weir.Received[int]) error {
			cancel()
			return nil
		}), nil)
		noError(t, err)
		return k.Run(call)
	}
	for _, login := range []bool{false, true} {
		t.Run(fmt.Sprintf("login %v", login), func(t *testing.T) {
			execute(t, admin, "revoke writers, readers from clerk")
			clerk, guest := as(login, "clerk"), as(login, "guest")
			produced(t, clerk, "open", numbers(1)...)
			attempts := func(c *weir.Client) map[string]error {
				_, copied := c.Copy(ctx, "closed", sequence(numbers(1)))
				return map[string]error{
					"produce":         second(c.Produce(ctx, "closed", numbers(1)...)),
					"produce bytes":   second(c.Produce(ctx, "blobs", weir.Message{Payload: "x"})),
					"produce by key":  second(c.Produce(ctx, "latest", weir.Message{Key: "k", Payload: 1})),
					"produce once":    second(c.Produce(ctx, "closed", weir.Message{Payload: 1, IdempotencyKey: fmt.Sprint(login)})),
					"produce delayed": second(c.Produce(ctx, "closed", weir.Message{Payload: 1, Delay: time.Millisecond})),
					"copy":            copied,
				}
			}
			reads := func(c *weir.Client) map[string]error {
				_, _, current := c.Current(ctx, "latest", "k")
				all := map[string]error{"read": second(c.Read(ctx, "closed", 0, 10)), "current": current}
				for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
					all["consume "+string(mode)] = take(c, string(mode))
				}
				return all
			}
			for _, m := range []map[string]error{attempts(clerk), reads(clerk)} {
				for what, err := range m {
					refused(what, err)
				}
			}
			// A lease that somebody else holds.
			lease := value[int64](t, admin, "select lease_id from weir.claim('closed', 'stream', 'x', 1, '100 ms')")
			own := connect(t, dsn)
			execute(t, own, "set role clerk")
			for _, statement := range []string{
				fmt.Sprintf("select * from weir.fetch(%d)", lease), fmt.Sprintf("select * from weir.fetch_many('{%d}')", lease),
				"select weir.make_room('closed', 1)", "select * from weir.claim('closed', 'queue', 'x')",
			} {
				_, err := own.Exec(ctx, statement)
				refused(statement, err)
			}
			delivery := value[int64](t, admin, "select lease_id from weir.claim('closed', 'queue', 'x', 1, '100 ms')")
			for _, f := range []string{"select * from weir.fetch(%d)", "select * from weir.fetch_many('{%d}')"} {
				_, err := own.Exec(ctx, fmt.Sprintf(f, delivery))
				refused(f, err)
			}

			for _, topic := range []string{"closed", "latest", "blobs"} {
				log := value[string](t, admin, "select log from weir.topics where topic = $1", topic)
				execute(t, admin, "grant insert (key, headers, payload) on "+log+" to writers; grant select (payload) on "+log+" to readers")
			}
			execute(t, admin, "grant writers to clerk")
			for what, err := range attempts(clerk) {
				noErrorOf(t, what, err)
			}
			for what, err := range reads(clerk) {
				refused(what, err)
			}
			execute(t, admin, "grant readers to clerk")
			for what, err := range reads(clerk) {
				noErrorOf(t, what, err)
			}
			refused("another role", second(guest.Produce(ctx, "closed", numbers(1)...)))
		})
	}

	off := false
	noError(t, c.AlterTopic(ctx, "closed", weir.TopicChange{Restricted: &off}))
	produced(t, as(false, "guest"), "closed", numbers(1)...)
	info, err := c.Topic(ctx, "latest")
	if err != nil || !info.Restricted {
		t.Errorf("it is described as %+v, %v", info, err)
	}
}

func noErrorOf(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("%s: %v", what, err)
	}
}
