package weirwatermill_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/weirhq/weir"
	weirwatermill "github.com/weirhq/weir/adapter/watermill"
)

const patience = 20 * time.Second

// take gives the next message.
func take(t *testing.T, messages <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case m, open := <-messages:
		if !open {
			t.Fatal("the channel is closed")
		}
		return m
	case <-time.After(patience):
		t.Fatal("no message came")
	}
	return nil
}

// closed waits until the channel is closed; nothing may come before.
func closed(t *testing.T, messages <-chan *message.Message) {
	t.Helper()
	select {
	case m, open := <-messages:
		if open {
			t.Fatalf("message %s came", m.UUID)
		}
	case <-time.After(patience):
		t.Fatal("the channel stays open")
	}
}

// ended waits until a context has ended and checks why.
func ended(t *testing.T, ctx context.Context, cause error) {
	t.Helper()
	select {
	case <-ctx.Done():
		isError(t, context.Cause(ctx), cause)
	case <-time.After(patience):
		t.Fatal("the context goes on")
	}
}

func received(t *testing.T, m *message.Message) *weir.Received[[]byte] {
	t.Helper()
	r, ok := weirwatermill.ReceivedFrom(m.Context())
	if !ok {
		t.Fatalf("message %s does not say what it was received as", m.UUID)
	}
	return r
}

func publisher(t *testing.T, c *weir.Client, config *weirwatermill.PublisherConfig) *weirwatermill.Publisher {
	t.Helper()
	p, err := weirwatermill.NewPublisher(c, config)
	noError(t, err)
	return p
}

func subscriber(t *testing.T, c *weir.Client, config *weirwatermill.SubscriberConfig) *weirwatermill.Subscriber {
	t.Helper()
	s, err := weirwatermill.NewSubscriber(c, "group", config)
	noError(t, err)
	t.Cleanup(func() { noError(t, s.Close()) })
	return s
}

func subscribe(t *testing.T, s *weirwatermill.Subscriber) <-chan *message.Message {
	t.Helper()
	messages, err := s.Subscribe(t.Context(), "topic")
	noError(t, err)
	return messages
}

// keyed publishes messages whose payload is their key.
var keyed = &weirwatermill.PublisherConfig{MessageKey: payloadKey, AutoCreate: true}

// group waits until the group is as it should be.
func group(t *testing.T, c *weir.Client, what string, is func(weir.Group) bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		g, err := c.Group(t.Context(), "topic", "group")
		noError(t, err)
		if is(g) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("want %s, the group is %+v", what, g)
		}
	}
}

func TestMessages(t *testing.T) {
	c := client(t, database(t, server))
	p := publisher(t, c, &weirwatermill.PublisherConfig{
		AutoCreate: true,
		MessageKey: func(topic string, m *message.Message) string { return topic + "/" + m.UUID },
		Complete: func(_ string, m *message.Message, out *weir.Message) {
			out.IdempotencyKey = m.UUID
		},
	})
	var sent []*message.Message
	for i, payload := range []string{"", "\x00\xff{", strings.Repeat("long", 100_000)} {
		m := message.NewMessage("uuid-"+strconv.Itoa(i), message.Payload(payload))
		m.Metadata.Set("empty", "")
		m.Metadata.Set("quo\"te", "värde\n")
		sent = append(sent, m)
	}
	sent = append(sent, &message.Message{}, message.NewMessage("last", nil))
	noError(t, p.Publish("topic"))
	noError(t, p.Publish("topic", sent...))
	noError(t, p.Publish("topic", sent[:2]...)) // duplicates
	_, err := c.Produce(t.Context(), "topic", weir.Message{Payload: []byte("foreign")})
	noError(t, err)

	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{GroupOptions: weir.GroupOptions{Mode: weir.Stream}}))
	for _, want := range sent {
		m := take(t, messages)
		if !m.Equals(want) {
			t.Errorf("got %q %v, want %q %v", m.UUID, m.Metadata, want.UUID, want.Metadata)
		}
		if r := received(t, m); r.Key != "topic/"+want.UUID || r.Topic != "topic" || r.Group != "group" || r.Attempt != 1 {
			t.Errorf("%+v", r)
		}
		m.Ack()
		ended(t, m.Context(), context.Canceled)
	}
	m := take(t, messages)
	if m.UUID != strconv.FormatInt(received(t, m).ID, 10) || string(m.Payload) != "foreign" || len(m.Metadata) != 0 {
		t.Errorf("%+v", m)
	}
	m.Ack()

	reserved, text := message.NewMessage("u", nil), message.NewMessage("u", nil)
	reserved.Metadata.Set(weirwatermill.UUIDHeader, "x")
	text.Metadata.Set("x", "\xff")
	isError(t, p.Publish("topic", sent[0], reserved), weir.ErrInvalid)
	err = p.Publish("topic", sent[0], text)
	isError(t, err, weir.ErrFormat)
	if !strings.Contains(err.Error(), "message 1") {
		t.Errorf("the error does not name the message: %v", err)
	}
	if _, ok := weirwatermill.ReceivedFrom(t.Context()); ok {
		t.Error("any context is a message's")
	}
}

func TestPublishContext(t *testing.T) {
	c := client(t, database(t, server))
	p := publisher(t, c, keyed)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	first, second := message.NewMessage("1", nil), message.NewMessageWithContext(ctx, "2", nil)
	isError(t, p.Publish("topic", first, second), context.Canceled)
	isError(t, p.Publish("topic", second), context.Canceled)
}

func TestNames(t *testing.T) {
	c := client(t, database(t, server))
	creates, plain := publisher(t, c, keyed), publisher(t, c, nil)
	s := subscriber(t, c, nil)
	for _, name := range []string{"", " a", "a ", "a\nb", "a\x00b", "\xff", strings.Repeat("x", 201)} {
		m := message.NewMessage("u", message.Payload("x"))
		isError(t, s.SubscribeInitialize(name), weir.ErrInvalid)
		_, err := s.Subscribe(t.Context(), name)
		isError(t, err, weir.ErrInvalid)
		isError(t, creates.Publish(name, m), weir.ErrInvalid)
		if err := plain.Publish(name, m); !errors.Is(err, weir.ErrTopicNotFound) && !errors.Is(err, weir.ErrInvalid) {
			t.Errorf("publish to %q: %v", name, err)
		}
	}
	isError(t, plain.Publish("missing", message.NewMessage("u", nil)), weir.ErrTopicNotFound)
	for i, name := range []string{"a", "Orders.eu/v1", `it's "here"`, "日本語", strings.Repeat("é", 200)} {
		noError(t, creates.Publish(name, message.NewMessage(strconv.Itoa(i), nil)))
		messages, err := s.Subscribe(t.Context(), name)
		noError(t, err)
		if m := take(t, messages); m.UUID != strconv.Itoa(i) || !m.Ack() {
			t.Errorf("topic %q has message %s", name, m.UUID)
		}
	}
}

func TestConfig(t *testing.T) {
	c := client(t, database(t, server))
	_, err := weirwatermill.NewPublisher(nil, nil)
	isError(t, err, weir.ErrInvalid)
	_, err = weirwatermill.NewSubscriber(nil, "group", nil)
	isError(t, err, weir.ErrInvalid)
	_, err = weirwatermill.NewSubscriber(c, "", nil)
	isError(t, err, weir.ErrInvalid)
	_, err = weirwatermill.NewSubscriber(c, "group", &weirwatermill.SubscriberConfig{NackDelay: 366 * 24 * time.Hour})
	isError(t, err, weir.ErrInvalid)
	_, err = weirwatermill.NewSubscriber(c, "group", &weirwatermill.SubscriberConfig{ConsumerOptions: weir.ConsumerOptions{Lease: 1}})
	isError(t, err, weir.ErrInvalid)
	_, err = weirwatermill.NewTxPublisher(c, nil, nil)
	isError(t, err, weir.ErrInvalid)
	_, err = weirwatermill.NewSQLTxPublisher(c, nil, nil)
	isError(t, err, weir.ErrInvalid)

	// What exists is looked up, or has to fit.
	looks := subscriber(t, c, &weirwatermill.SubscriberConfig{NoCreate: true})
	isError(t, looks.SubscribeInitialize("topic"), weir.ErrTopicNotFound)
	noError(t, c.CreateTopic(t.Context(), "topic", nil))
	_, err = looks.Subscribe(t.Context(), "topic")
	isError(t, err, weir.ErrGroupNotFound)
	noError(t, c.CreateGroup(t.Context(), "topic", "group", nil))
	noError(t, looks.SubscribeInitialize("topic"))
	isError(t, subscriber(t, c, nil).SubscribeInitialize("topic"), weir.ErrConflict)
	fits := &weirwatermill.SubscriberConfig{TopicOptions: weir.TopicOptions{Format: weir.JSON}}
	isError(t, subscriber(t, c, fits).SubscribeInitialize("topic"), weir.ErrConflict)
	fits.GroupOptions.Mode = weir.Stream
	noError(t, subscriber(t, c, fits).SubscribeInitialize("topic"))

	// A JSON topic takes what is JSON.
	p := publisher(t, c, nil)
	isError(t, p.Publish("topic", message.NewMessage("1", message.Payload("{"))), weir.ErrFormat)
	noError(t, p.Publish("topic", message.NewMessage("2", message.Payload("{}"))))
	if m := take(t, subscribe(t, looks)); m.UUID != "2" || string(m.Payload) != "{}" || !m.Ack() {
		t.Errorf("%+v", m)
	}
}

// A nacked message holds up its key, and nothing else, until it is acked.
func TestNackKeepsOrder(t *testing.T) {
	c := client(t, database(t, server))
	p := publisher(t, c, keyed)
	for i, key := range []string{"a", "a", "b", "a", "b"} {
		noError(t, p.Publish("topic", message.NewMessage(strconv.Itoa(i), message.Payload(key))))
	}
	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{NackDelay: 100 * time.Millisecond}))
	order := map[string]string{}
	var all strings.Builder
	for nacks := 0; all.Len() < 5; {
		m := take(t, messages)
		if m.UUID == "0" && nacks < 15 { // more than the group's MaxAttempts
			nacks++
			m.Nack()
			ended(t, m.Context(), context.Canceled)
			if m.Ack() {
				t.Error("an Ack after a Nack counts")
			}
			if a := received(t, m).Attempt; a != 1 {
				t.Errorf("after %d nacks it is attempt %d", nacks, a)
			}
			continue
		}
		order[string(m.Payload)] += m.UUID
		all.WriteString(m.UUID)
		m.Ack()
	}
	if order["a"] != "013" || order["b"] != "24" {
		t.Errorf("order by key: %v", order)
	}
	if all.String() != "24013" {
		t.Errorf("order: %s, key b did not go on", all.String())
	}
}

func TestCountNacks(t *testing.T) {
	c := client(t, database(t, server))
	noError(t, publisher(t, c, keyed).Publish("topic", message.NewMessage("0", nil), message.NewMessage("1", nil)))
	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{
		GroupOptions: weir.GroupOptions{MaxAttempts: 3, RetryDelay: -1}, CountNacks: true,
	}))
	attempts := map[string]int{}
	for range 6 {
		m := take(t, messages)
		attempts[m.UUID]++
		if a := received(t, m).Attempt; a != attempts[m.UUID] {
			t.Errorf("message %s: attempt %d, want %d", m.UUID, a, attempts[m.UUID])
		}
		m.Nack()
	}
	group(t, c, "two dead letters", func(g weir.Group) bool { return g.Dead == 2 && g.Retrying == 0 })
}

// The time for an Ack runs from when the message is taken.
func TestHandlerTimeout(t *testing.T) {
	c := client(t, database(t, server))
	noError(t, publisher(t, c, keyed).Publish("topic", message.NewMessage("0", nil)))
	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{
		GroupOptions:    weir.GroupOptions{RetryDelay: -1},
		ConsumerOptions: weir.ConsumerOptions{HandlerTimeout: 50 * time.Millisecond},
	}))
	group(t, c, "the message held", func(g weir.Group) bool { return g.Leases > 0 })
	time.Sleep(200 * time.Millisecond) // nobody takes it
	for attempt := 1; attempt <= 3; attempt++ {
		m := take(t, messages)
		if a := received(t, m).Attempt; a != attempt {
			t.Fatalf("attempt %d, want %d", a, attempt)
		}
		if attempt == 3 {
			m.Ack()
			break
		}
		ended(t, m.Context(), weir.ErrHandlerTimeout)
	}
	group(t, c, "nothing left", func(g weir.Group) bool { return g.Leases == 0 && g.Retrying == 0 && g.Lag == 0 })
}

// A time limit of the message's own that passes before it is taken is no attempt.
func TestMessageTimeout(t *testing.T) {
	c := client(t, database(t, server))
	p := publisher(t, c, &weirwatermill.PublisherConfig{
		AutoCreate: true,
		Complete:   func(_ string, _ *message.Message, out *weir.Message) { out.Timeout = 100 * time.Millisecond },
	})
	noError(t, p.Publish("topic", message.NewMessage("0", nil)))
	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{
		GroupOptions: weir.GroupOptions{RetryDelay: -1}, NackDelay: 20 * time.Millisecond,
	}))
	group(t, c, "the message given up once", func(g weir.Group) bool { return g.Retrying > 0 })
	m := take(t, messages)
	if a := received(t, m).Attempt; a != 1 {
		t.Errorf("attempt %d", a)
	}
	ended(t, m.Context(), weir.ErrHandlerTimeout)
	m = take(t, messages)
	if a := received(t, m).Attempt; a != 2 {
		t.Errorf("attempt %d", a)
	}
	m.Ack()
}

// Close waits for what was taken; what was not goes to others, as its first attempt.
func TestClose(t *testing.T) {
	for _, mode := range []weir.Mode{weir.Ordered, weir.Stream, weir.Queue} {
		t.Run(string(mode), func(t *testing.T) {
			c := client(t, database(t, server))
			config := &weirwatermill.SubscriberConfig{
				GroupOptions: weir.GroupOptions{Mode: mode}, ConsumerOptions: weir.ConsumerOptions{Name: "one"},
			}
			p := publisher(t, c, keyed)
			for i := range 3 {
				noError(t, p.Publish("topic", message.NewMessage(strconv.Itoa(i), nil)))
			}
			s := subscriber(t, c, config)
			messages := subscribe(t, s)
			first := take(t, messages)
			done := make(chan error)
			go func() { done <- s.Close() }()
			select {
			case <-done:
				t.Fatal("Close does not wait")
			case <-time.After(100 * time.Millisecond):
			}
			if err := first.Context().Err(); err != nil {
				t.Errorf("the context of a message that was taken ends with Close: %v", err)
			}
			first.Ack()
			noError(t, <-done)
			closed(t, messages)
			noError(t, s.Close())
			_, err := s.Subscribe(t.Context(), "topic")
			isError(t, err, weirwatermill.ErrClosed)
			isError(t, s.SubscribeInitialize("topic"), weirwatermill.ErrClosed)

			messages = subscribe(t, subscriber(t, c, config))
			rest := map[string]bool{}
			for range 2 {
				m := take(t, messages)
				if a := received(t, m).Attempt; a != 1 {
					t.Errorf("message %s: attempt %d", m.UUID, a)
				}
				rest[m.UUID] = true
				m.Ack()
			}
			if rest[first.UUID] || len(rest) != 2 {
				t.Errorf("after %s came %v", first.UUID, rest)
			}
			group(t, c, "nothing left", func(g weir.Group) bool { return g.Leases == 0 && g.Retrying == 0 && g.Lag == 0 })

			noError(t, p.Close())
			isError(t, p.Publish("topic", message.NewMessage("late", nil)), weirwatermill.ErrClosed)
		})
	}
}

// A message that is not acked in time for the end comes again, and its attempt did not count.
func TestStopTimeout(t *testing.T) {
	c := client(t, database(t, server))
	noError(t, publisher(t, c, keyed).Publish("topic", message.NewMessage("0", nil)))
	config := &weirwatermill.SubscriberConfig{ConsumerOptions: weir.ConsumerOptions{StopTimeout: 50 * time.Millisecond}}
	s := subscriber(t, c, config)
	messages := subscribe(t, s)
	m := take(t, messages)
	noError(t, s.Close())
	ended(t, m.Context(), weir.ErrStopped)
	closed(t, messages)
	m = take(t, subscribe(t, subscriber(t, c, config)))
	if a := received(t, m).Attempt; a != 1 {
		t.Errorf("attempt %d", a)
	}
	m.Ack()
}

func TestSubscribeContext(t *testing.T) {
	c := client(t, database(t, server))
	noError(t, publisher(t, c, keyed).Publish("topic", message.NewMessage("0", nil)))
	s := subscriber(t, c, nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	messages, err := s.Subscribe(ctx, "topic")
	noError(t, err)
	m := take(t, messages)
	over := errors.New("over")
	cancel(over)
	ended(t, m.Context(), over)
	m.Ack()
	closed(t, messages)
	group(t, c, "nothing left", func(g weir.Group) bool { return g.Leases == 0 && g.Lag == 0 })
	_, err = s.Subscribe(ctx, "topic")
	isError(t, err, context.Canceled)
}

// A subscription that cannot go on says so and ends.
func TestDroppedTopic(t *testing.T) {
	c := client(t, database(t, server))
	logger := errorLogger{errs: make(chan error, 100)}
	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{Logger: logger}))
	_, err := c.DropTopic(t.Context(), "topic", &weir.DropOptions{Force: true})
	noError(t, err)
	closed(t, messages)
	for deadline := time.After(patience); ; {
		select {
		case err := <-logger.errs:
			if errors.Is(err, weir.ErrTopicNotFound) {
				return
			}
		case <-deadline:
			t.Fatal("it is not logged that the topic is gone")
		}
	}
}

// errorLogger passes on what is logged as an error. Watermill's own CaptureLogger hands out the map that it goes on writing to.
type errorLogger struct {
	watermill.NopLogger
	errs chan error
}

func (l errorLogger) Error(_ string, err error, _ watermill.LogFields) { l.errs <- err }

func (l errorLogger) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func TestTxPublisher(t *testing.T) {
	pool := database(t, server)
	c := client(t, pool)
	messages := subscribe(t, subscriber(t, c, &weirwatermill.SubscriberConfig{ConsumerOptions: weir.ConsumerOptions{PollInterval: time.Minute}}))
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	for i, commit := range []bool{false, true} {
		tx, err := pool.Begin(t.Context())
		noError(t, err)
		sqlTx, err := db.BeginTx(t.Context(), nil)
		noError(t, err)
		_, err = weirwatermill.NewTxPublisher(c, tx, keyed)
		isError(t, err, weir.ErrInvalid) // AutoCreate
		p, err := weirwatermill.NewTxPublisher(c, tx, nil)
		noError(t, err)
		sqlP, err := weirwatermill.NewSQLTxPublisher(c, sqlTx, nil)
		noError(t, err)
		for name, p := range map[string]*weirwatermill.TxPublisher{"pgx": p, "sql": sqlP} {
			noError(t, p.Publish("topic"))
			noError(t, p.Publish("topic",
				message.NewMessage(fmt.Sprint(name, i, "a"), message.Payload("\x00\xff")), message.NewMessage(fmt.Sprint(name, i, "b"), nil)))
			noError(t, p.Close())
			isError(t, p.Publish("topic", message.NewMessage("late", nil)), weirwatermill.ErrClosed)
		}
		if !commit {
			noError(t, tx.Rollback(t.Context()))
			noError(t, sqlTx.Rollback())
			continue
		}
		noError(t, tx.Commit(t.Context()))
		noError(t, sqlTx.Commit())
		p.Wake()
		sqlP.Wake()
	}
	got := map[string]string{}
	for range 4 {
		m := take(t, messages)
		got[m.UUID] = string(m.Payload)
		m.Ack()
	}
	want := map[string]string{"pgx1a": "\x00\xff", "pgx1b": "", "sql1a": "\x00\xff", "sql1b": ""}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
