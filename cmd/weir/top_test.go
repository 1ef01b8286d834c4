package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// topScreen is a screen without a terminal.
type topScreen struct {
	*topModel
	t *testing.T
}

func newTopScreen(t *testing.T, samples ...topSample) topScreen {
	t.Parallel()
	order := topOrder{column: slices.Index(topGroupNames(), "lag")}
	s := topScreen{newTopModel(nil, time.Second, order, false), t}
	s.Update(tea.WindowSizeMsg{Width: 120, Height: 30})
	for _, sample := range samples {
		s.Update(sample)
	}
	return s
}

// press presses keys: names of keys, or characters.
func (s topScreen) press(keys ...string) tea.Cmd {
	s.t.Helper()
	named := map[string]tea.KeyPressMsg{
		"up": {Code: tea.KeyUp}, "down": {Code: tea.KeyDown}, "left": {Code: tea.KeyLeft}, "right": {Code: tea.KeyRight},
		"enter": {Code: tea.KeyEnter}, "esc": {Code: tea.KeyEscape}, "tab": {Code: tea.KeyTab}, "end": {Code: tea.KeyEnd},
		"ctrl+c": {Code: 'c', Mod: tea.ModCtrl}, "backspace": {Code: tea.KeyBackspace},
	}
	var last tea.Cmd
	for _, k := range keys {
		msg, found := named[k]
		if !found {
			msg = tea.KeyPressMsg{Code: []rune(k)[0], Text: k}
		}
		if msg.String() != k {
			s.t.Fatalf("the key %q is called %q", k, msg.String())
		}
		_, last = s.Update(msg)
	}
	return last
}

func (s topScreen) screen() string {
	s.t.Helper()
	content := s.View().Content
	lines := strings.Split(content, "\n")
	if len(lines) > s.height {
		s.t.Errorf("%d lines in a terminal of %d", len(lines), s.height)
	}
	for _, line := range lines {
		if ansi.StringWidth(line) > s.width {
			s.t.Errorf("a line is wider than %d: %q", s.width, line)
		}
	}
	return content
}

// groupOrder are the names of the groups as they stand on the screen; the one at the cursor begins with ">".
func (s topScreen) groupOrder() string {
	s.t.Helper()
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^(>| ) \S+ +(g\d+) +(?:stream|queue)`).FindAllStringSubmatch(s.screen(), -1) {
		names = append(names, strings.TrimSpace(m[1])+m[2])
	}
	return strings.Join(names, " ")
}

func (s topScreen) has(patterns ...string) {
	s.t.Helper()
	screen := s.screen()
	for _, p := range patterns {
		if !regexp.MustCompile("(?m)" + p).MatchString(screen) {
			s.t.Errorf("%q is not on the screen:\n%s", p, screen)
		}
	}
}

var topBegan = time.Date(2026, 1, 31, 12, 0, 0, 0, time.Local)

// topOf is a sample, so many seconds later. Groups are g1, g2, ... with these lags.
func topOf(seconds int, head int64, lags ...int64) topSample {
	at := topBegan.Add(time.Duration(seconds) * time.Second)
	s := topSample{At: at, groupsAt: at, began: at}
	topic := topTopic{topicJSON: topicJSON{Topic: weir.Topic{Name: "orders", Head: head, Settled: head - 5, Bytes: 3 << 20, Groups: len(lags)}}}
	s.Topics = []topTopic{topic}
	for i, lag := range lags {
		s.Groups = append(s.Groups, topGroup{Group: weir.Group{
			Topic: "orders", Name: fmt.Sprintf("g%d", i+1), Mode: weir.Stream, Head: head, Committed: head - lag, Lag: lag, Dead: i * 10,
		}})
	}
	return s
}

func TestTopRates(t *testing.T) {
	s := newTopScreen(t, topOf(0, 1000, 100, 40))
	s.has(`^  TOPIC +RATE↓ +HEAD`, `^  orders +- +1000 +5 +`, `^> orders +g1 +stream +100 +- +- `)
	next := topOf(2, 3000, 100, 2040) // two seconds on
	next.Groups[0].Retrying, next.Groups[0].Dead = 50, 70
	s.Update(next)
	s.has(`^weir top  every 1s  12:00:02  1 topic, 2 groups, 0 blockers$`, `^  orders +1000 +3000 +5 +0 +3MB +2$`,
		`^  orders +g1 +stream +100 +- +975 `, `^> orders +g2 +stream +2040 +- +0 `)

	// Moved back; made anew under the same name; gone.
	last := topOf(3, 3010, 5000, 0)
	last.Groups[0].Committed = 10
	last.Groups[1].CreatedAt = topBegan
	last.Topics[0].Head = 3007
	s.Update(last)
	s.has(`^  orders +7.0 +3007 `, `^> orders +g1 +stream +5000 +- +0 `, `^  orders +g2 +stream +0 +- +- `)
	s.Update(topOf(4, 3010, 1))
	if got := s.groupOrder(); got != ">g1" {
		t.Errorf("groups %q", got)
	}
}

func TestTopSortsAndMoves(t *testing.T) {
	s := newTopScreen(t, topOf(0, 1000, 10, 30, 20))
	steps := []struct{ keys, want string }{
		{"", ">g2 g3 g1"},
		{"j", "g2 >g3 g1"},
		{"down down j", "g2 g3 >g1"},
		{"k up", ">g2 g3 g1"},
		{"r", "g1 g3 >g2"}, // the cursor stays with its group
		{"r g", ">g2 g3 g1"},
		{"left left", ">g1 g2 g3"}, // by name
		{"r", ">g3 g2 g1"},
		{"left left right right right right right right right right right right", ">g3 g2 g1"}, // by dead letters
		{"right right right right right right", ">g2 g3 g1"},                                   // once round
		{"end", "g2 g3 >g1"},
		{"tab j", "g2 g3 g1"}, // in the topics
		{"tab", "g2 g3 >g1"},
	}
	for _, step := range steps {
		s.press(strings.Fields(step.keys)...)
		if got := s.groupOrder(); got != step.want {
			t.Fatalf("after %q the groups are %q, want %q\n%s", step.keys, got, step.want, s.screen())
		}
	}
	s.has(`LAG↓`)
	s.press("r")
	s.has(`LAG↑`)
	// A group that was moved to keeps the cursor when it gets another place.
	s.press("g", "j")
	s.Update(topOf(1, 1000, 10, 30, 40))
	if got := s.groupOrder(); got != "g1 g2 >g3" {
		t.Errorf("the groups are %q", got)
	}
	for _, quits := range []string{"q", "ctrl+c"} {
		if cmd := s.press(quits); cmd == nil || cmd() != tea.Quit() {
			t.Errorf("%s does not end it", quits)
		}
	}
}

func TestTopFilters(t *testing.T) {
	sample := topOf(0, 1000, 10, 30, 20)
	sample.Topics = append(sample.Topics, topTopic{topicJSON: topicJSON{Topic: weir.Topic{Name: "views"}}})
	sample.Groups = append(sample.Groups, topGroup{Group: weir.Group{Topic: "views", Name: "g4", Mode: weir.Queue}})
	s := newTopScreen(t, sample)
	s.press("/", "G", "2")
	if v := s.View(); v.Cursor == nil || v.Cursor.X != 3 || v.Cursor.Y != 1 {
		t.Errorf("the cursor is at %+v", v.Cursor)
	}
	s.has(`^/G2 *$`, `^  orders +- `)
	if got := s.groupOrder(); got != ">g2" || strings.Contains(s.screen(), "views") {
		t.Errorf("the groups are %q\n%s", got, s.screen())
	}
	s.press("backspace", "backspace", "q", "q") // letters now
	s.Update(tea.PasteMsg{Content: "none"})
	s.has(`^/qqnone *$`)
	s.press("enter", "j", "enter")
	if got := s.groupOrder(); got != "" || s.opened != "" {
		t.Errorf("the groups are %q, %q is open", got, s.opened)
	}
	s.press("esc", "/", "V", "i", "enter", "j")
	if got := s.groupOrder(); got != ">g4" {
		t.Errorf("the groups are %q", got)
	}
	s.press("esc")
	if got := s.groupOrder(); got != "g2 g3 g1 >g4" {
		t.Errorf("the groups are %q", got)
	}
	if cmd := s.press("/", "ctrl+c"); cmd == nil || cmd() != tea.Quit() {
		t.Error("ctrl+c does not end it")
	}
}

func TestTopConsumers(t *testing.T) {
	sample := topOf(0, 1000, 10, 30)
	sample.Groups[0].Consumers = []weir.ConsumerInfo{
		{Name: "worker-1", Host: "a", PID: 7, Leases: 2, Messages: 40}, {Name: "worker\x1b[31m", Leases: 1},
	}
	s := newTopScreen(t, sample)
	s.press("enter")
	s.has(`^  orders +g2 `, `no consumer`)
	s.press("esc", "j", "enter")
	s.has(`^  orders +g1 `, `^  CONSUMER +PROCESS`, `^> worker-1 +a:7 .* 2 +40 +-$`, `^  worker\\x1b\[31m +- `)
	s.press("j")
	s.has(`^> worker\\x1b`)
	gone := topOf(1, 1000)
	s.Update(gone)
	s.has(`^group "g1" of topic "orders" is gone`)
	s.press("enter")
	s.has(`^  TOPIC +GROUP +MODE`)
}

func TestTopBlockersAndHeight(t *testing.T) {
	lags := make([]int64, 200)
	for i := range lags {
		lags[i] = int64(1000 - i)
	}
	sample := topOf(0, 5000, lags...)
	for i := range 40 {
		sample.Topics = append(sample.Topics, topTopic{topicJSON: topicJSON{Topic: weir.Topic{Name: strings.Repeat("long", 30) + fmt.Sprint(i)}}})
		sample.Blockers = append(sample.Blockers, weir.Blocker{Topic: "orders", PID: int32(4000 + i), Age: time.Minute, Query: "select 1"})
	}
	s := newTopScreen(t, sample)
	s.has(`^  TOPIC .*\(1 to \d+ of 41\)`, `^  TOPIC +GROUP .*\(1 to \d+ of 200\)`, `^  TOPIC +PID .*\(1 to 5 of 40\)`, `^  orders +4000 .* 1m0s`, `^q quit`)
	s.press("end")
	if got := s.groupOrder(); !strings.HasSuffix(got, ">g200") {
		t.Errorf("the groups are %q", got)
	}
	s.press("?")
	s.has(`ctrl\+z +suspend`)
	for width := 1; width < 130; width += 16 {
		for height := 1; height < 40; height += 4 {
			s.Update(tea.WindowSizeMsg{Width: width, Height: height})
			s.screen()
		}
	}
}

func TestTopLosesTheConnection(t *testing.T) {
	s := newTopScreen(t)
	s.has(`^weir top  every 1s$`)
	fail := topFailed{topBegan.Add(time.Second), errors.New("refused\nconnection")}
	if _, cmd := s.Update(fail); cmd == nil {
		t.Fatal("no other read is planned")
	}
	s.has(`^nothing could be read since 12:00:01: refused\\nconnection`)
	s.Update(topOf(2, 1000, 10))
	if screen := s.screen(); strings.Contains(screen, "could be read") {
		t.Errorf("the error is still there\n%s", screen)
	}
	s.Update(topFailed{topBegan.Add(3 * time.Second), errors.New("first")})
	s.Update(topFailed{topBegan.Add(4 * time.Second), errors.New("second")})
	s.has(`^nothing could be read since 12:00:03: second`, `^> orders +g1 `, `12:00:02  1 topic`)
	// The rates are then those of the whole time.
	s.Update(topOf(12, 2000, 10))
	s.has(`^  orders +100 +2000`)
}

// TestTopReadsOnceAnInterval: a read is followed by the time until the next, and never by another one that runs beside it.
func TestTopReadsOnceAnInterval(t *testing.T) {
	t.Parallel()
	const interval = 60 * time.Millisecond
	reads := 0
	m := newTopModel(func() (topSample, error) {
		reads++
		if reads == 2 {
			return topSample{}, errors.New("lost")
		}
		return topSample{began: time.Now()}, nil
	}, interval, topOrder{}, false)
	began := time.Now()
	cmd := m.Init()
	for range 8 { // reads and waits in turn
		_, cmd = m.Update(cmd())
	}
	if reads != 4 || time.Since(began) < 4*interval-5*time.Millisecond {
		t.Errorf("%d reads in %v, want 4 in 4 intervals of %v", reads, time.Since(began), interval)
	}
}

// TestTopColors: there are none but for a terminal that has them.
func TestTopColors(t *testing.T) {
	s := newTopScreen(t, topOf(0, 1000, 10))
	s.press("/", "o")
	if screen := s.screen(); strings.Contains(screen, "\x1b") {
		t.Errorf("colours: %q", screen)
	}
	s.color = true
	s.press("enter")
	s.has("^\x1b\\[1mweir top\x1b", "^\x1b\\[7m> orders +g1")
}

// TestTopProgram runs the program with pipes for a terminal, on a server that ends its connections once.
func TestTopProgram(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("", "group", "create", "events", "audit")
	client, err := weir.Open(t.Context(), c.dsn, &weir.Options{NoMaintenance: true, NoListen: true})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())

	keys, press := io.Pipe()
	var screen bytes.Buffer
	var reads, failed atomic.Int64
	model := newTopModel(func() (topSample, error) {
		if reads.Add(1) == 3 {
			_, err := conn.Exec(t.Context(), `
				select pg_terminate_backend(a.pid, 5000) from pg_stat_activity as a
				where a.datname = current_database() and a.pid <> pg_backend_pid()`)
			if err != nil {
				t.Error(err)
			}
		}
		s, err := readTop(t.Context(), client)
		switch {
		case err != nil:
			failed.Add(1)
		case failed.Load() > 0:
			go func() { _, _ = press.Write([]byte("q")) }()
		}
		return s, err
	}, 20*time.Millisecond, topOrder{column: 3}, false)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	final, err := tea.NewProgram(model, tea.WithContext(ctx), tea.WithInput(keys), tea.WithOutput(&screen), tea.WithoutSignalHandler(),
		tea.WithWindowSize(100, 20), tea.WithEnvironment([]string{"TERM=xterm"})).Run()
	if err != nil || failed.Load() == 0 || reads.Load() < 4 {
		t.Fatalf("%v; %d reads, %d failed\n%q", err, reads.Load(), failed.Load(), screen.String())
	}
	m := final.(*topModel)
	// m.lost may be set once more: another connection of the pool may be one that was ended.
	if len(m.sample.Groups) != 1 || m.sample.Groups[0].Rate == nil {
		t.Errorf("it ends with %v, %+v", m.lost, m.sample)
	}
	if !strings.Contains(screen.String(), "audit") {
		t.Errorf("the screen has %q", screen.String())
	}
}

func TestTopOnce(t *testing.T) {
	c := newCLI(t)
	c.ok("", "topic", "create", "events")
	c.ok("", "topic", "create", "idle")
	c.ok("", "group", "create", "events", "audit")
	c.ok("", "group", "create", "events", "billing", "--start", "head")
	c.ok("", "group", "create", "idle", "nobody")
	c.ok(strings.Repeat("1\n", 10), "produce", "events")

	// Produced, and handled, between its two reads.
	cmd := c.command("top", "--interval", "3s", "--output", "json")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	eventually(t, "it has read once", func() bool {
		var n int
		err := conn.QueryRow(t.Context(), `
			select count(*) from pg_stat_activity as a
			where a.datname = current_database() and a.state = 'idle' and a.query like '%weir.blockers%'`).Scan(&n)
		return err == nil && n == 1
	})
	c.ok(strings.Repeat("1\n", 300), "produce", "events")
	c.ok("", "consume", "events", "audit", "--max", "30")
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	s := c.objects(out.String())[0]
	seconds := s["seconds"].(float64)
	if seconds < 3 || seconds > 10 {
		t.Errorf("the rates are over %v s", seconds)
	}
	list := func(of string) (all []map[string]any) {
		for _, v := range s[of].([]any) {
			all = append(all, v.(map[string]any))
		}
		return all
	}
	near := func(what string, rate any, n float64) {
		t.Helper()
		if r, ok := rate.(float64); !ok || r*seconds < n-1 || r*seconds > n+1 {
			t.Errorf("the rate of %s is %v over %v s, want that of %v", what, rate, seconds, n)
		}
	}
	topics, groups := list("topics"), list("groups")
	if len(topics) != 2 || topics[0]["topic"] != "events" || topics[0]["bytes"].(float64) < 8192 {
		t.Fatalf("topics %v", topics)
	}
	near("events", topics[0]["rate"], 300)
	near("idle", topics[1]["rate"], 0)
	if len(groups) != 3 || groups[0]["group"] != "billing" || groups[1]["group"] != "audit" || len(groups[0]["consumers"].([]any)) != 0 {
		t.Fatalf("groups %v", groups)
	}
	near("audit", groups[1]["rate"], 30)
	if blockers := list("blockers"); len(blockers) != 0 {
		t.Errorf("blockers %v", blockers)
	}

	// Standard output is no terminal here. Something is open now.
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select weir.produce('events', '1')`); err != nil {
		t.Fatal(err)
	}
	c.ok("2\n", "produce", "events")
	text := c.ok("", "top", "--interval", "100ms", "--sort", "group")
	if !regexp.MustCompile(`(?s)^TOPIC +RATE +HEAD .*\nevents +0 +.*\n\nTOPIC +GROUP +MODE .*\nevents +audit .*\nevents +billing .*\nidle +nobody .*\n\nTOPIC +PID .*\nevents +\d+ `).MatchString(text) ||
		strings.Contains(text, "\x1b") {
		t.Errorf("it printed\n%s", text)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := c.ok("", "top", "--once", "--interval", "100ms"); strings.Contains(again, "PID") {
		t.Errorf("it printed\n%s", again)
	}
	for _, args := range []string{"--interval 1ms", "--interval 2h", "--sort size", "more"} {
		c.fails(exitUsage, "", append([]string{"top"}, strings.Fields(args)...), `^weir: `)
	}
	c.fails(exitFailed, "", []string{"top", "--schema", "elsewhere"}, "not installed")
}
