package weir_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/weirhq/weir"
)

func stringsInto(t *testing.T, want string, y *tally) func(context.Context, *weir.Received[string]) error {
	return func(_ context.Context, m *weir.Received[string]) error {
		if m.Value != want || m.Topic != want || m.Group != want || m.Key != want {
			t.Errorf("got %+v, want everything to be %q", m, want)
		}
		y.add(m.ID)
		return nil
	}
}

// Names that are hard to quote work everywhere; others are refused before they have any effect.
func TestNames(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	ctx := t.Context()
	good := []string{
		"a", "orders.eu.v1", ".", "..", "a/b", `C:\x`, "it's", `say "hi"`, `"`, `'`, "`", "UPPER", "upper", "Upper", "two words",
		"a  b", "$1", "%s", "%", "_", "*", "weir", "weir.topic", "select", "null", "NULL", "0", "-1", "日本語", "ünïcödé",
		"u\u0308", "\u00fc", "🦫", "a,b", "{a}", "a;drop table weir.topic", "--", "/*", "log_1", "log_1_id",
		strings.Repeat("x", 200), strings.Repeat("é", 200), strings.Repeat("🦫", 200),
	}
	handled := map[string]*tally{}
	for _, name := range good {
		topicAndGroup(t, c, name, name, nil, nil)
		topicAndGroup(t, c, name, name, nil, nil) // again
		produced(t, c, name, weir.Message{Key: name, Payload: name})
	}
	topics, err := c.Topics(ctx)
	noError(t, err)
	groups, err := c.Groups(ctx, "")
	noError(t, err)
	if len(topics) != len(good) || len(groups) != len(good) {
		t.Errorf("%d topics and %d groups, want %d", len(topics), len(groups), len(good))
	}
	for i, name := range good {
		got := stored(t, c, name)
		if len(got) != 1 || got[0].Key != name {
			t.Errorf("topic %q has %+v", name, got)
		}
		if g := group(t, c, name, name); g.Topic != name || g.Name != name {
			t.Errorf("group of %q is %+v", name, g)
		}
		if i%6 == 0 { // a consumer each would be slow
			handled[name] = newTally()
			k := consume(t, c, name, name, weir.Handle(stringsInto(t, name, handled[name])), &weir.ConsumerOptions{Name: name})
			eventually(t, "the message of "+name+" is handled", func() bool { return handled[name].distinct() == 1 })
			k.stop()
		}
		if n, err := c.Redrive(ctx, name, name, 0); err != nil || n != 0 {
			t.Errorf("redrive of %q: %d, %v", name, n, err)
		}
		if n, err := c.RedriveMany(ctx, name, name, weir.DeadFilter{Key: name, KeyPrefix: name, Error: name}, &weir.RedriveOptions{To: name}); err != nil || n != 0 {
			t.Errorf("redrive of %q to itself: %d, %v", name, n, err)
		}
		noError(t, c.RenameGroup(ctx, name, name, "another"))
		noError(t, c.RenameGroup(ctx, name, "another", name))
		if _, err := c.PauseGroup(ctx, name, name); err != nil {
			t.Errorf("pause of %q: %v", name, err)
		}
		prefix, headers := name, map[string]string{name: name}
		noError(t, c.AlterGroup(ctx, name, name, weir.GroupChange{KeyPrefix: &prefix, Headers: &headers}))
		if g := group(t, c, name, name); g.KeyPrefix != name || g.Headers[name] != name || g.PausedAt == nil {
			t.Errorf("group of %q is %+v", name, g)
		}
	}
	for _, name := range good {
		if dropped, err := c.DropGroup(ctx, name, name, nil); err != nil || !dropped {
			t.Errorf("drop group %q: %v, %v", name, dropped, err)
		}
		if dropped, err := c.DropTopic(ctx, name, nil); err != nil || !dropped {
			t.Errorf("drop topic %q: %v, %v", name, dropped, err)
		}
	}
	conn := connect(t, dsn)
	if n := value[int](t, conn, `select count(*) from pg_class where relnamespace = 'weir'::regnamespace and relname ~ '^log_[0-9]'`); n != 0 {
		t.Errorf("%d relations of dropped topics are left", n)
	}

	topicAndGroup(t, c, "t", "g", nil, nil)
	state := func() string {
		return value[string](t, conn, `
			select concat_ws(' ', (select count(*) from weir.topic), (select count(*) from weir.consumer_group),
				(select count(*) from pg_class where relnamespace = 'weir'::regnamespace))`)
	}
	before := state()
	for _, name := range []string{
		"", " ", " a", "a ", "a\n", "\na", "a\tb", "a\x00b", "\x00", "\x7f", "\x1b[31m", "\xff", "a\xc3", "\xed\xa0\x80",
		strings.Repeat("x", 201), strings.Repeat("é", 201), strings.Repeat("x", 1<<20),
	} {
		for what, err := range map[string]error{
			"topic": c.CreateTopic(ctx, name, nil),
			"group": c.CreateGroup(ctx, "t", name, nil),
			"name":  c.RenameGroup(ctx, "t", "g", name),
		} {
			if !errors.Is(err, weir.ErrInvalid) || !strings.Contains(err.Error(), what) {
				t.Errorf("%s %.20q: error is %.300v, want ErrInvalid", what, name, err)
			}
		}
		// Asking for one is asking for what is not there.
		_, err := c.Produce(ctx, name, numbers(1)...)
		if err == nil {
			t.Errorf("produced to %q", name)
		}
	}
	if after := state(); after != before {
		t.Errorf("refused names left something: %s, was %s", after, before)
	}
	produced(t, c, "t", numbers(1)...)
}
