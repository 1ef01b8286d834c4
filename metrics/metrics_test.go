package metrics_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/metrics"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// open gives a client on an empty database with Weir in it.
func open(t *testing.T) (*weir.Client, string) {
	t.Helper()
	dsn := pgtest.Shared(t).Database(t)
	c, err := weir.Open(t.Context(), dsn, &weir.Options{Migrate: true, NoMaintenance: true, Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	t.Cleanup(c.Close)
	return c, dsn
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	noError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// scrape gathers what collectors give, each value under its name and labels, as Prometheus writes them.
func scrape(t *testing.T, collectors ...prometheus.Collector) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collectors...)
	families, err := registry.Gather()
	noError(t, err)
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			if labels != nil {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			if m.Counter != nil {
				values[name] = m.Counter.GetValue()
			} else {
				values[name] = m.Gauge.GetValue()
			}
		}
	}
	return values
}

func is(t *testing.T, got, want map[string]float64) {
	t.Helper()
	for name, v := range want {
		if g, found := got[name]; !found || g != v {
			t.Errorf("%s is %v (%v), want %v", name, g, found, v)
		}
	}
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for began := time.Now(); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

// run runs a consumer to the test's end.
func run(t *testing.T, k *weir.Consumer) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		noError(t, <-done)
	})
}

// TestCollector: the figures of a topic with a blocker and of groups that have handled, failed, held and done nothing.
func TestCollector(t *testing.T) {
	t.Parallel()
	c, dsn := open(t)
	ctx := t.Context()
	noError(t, c.CreateTopic(ctx, "orders", nil))
	noError(t, c.CreateTopic(ctx, `a "b" c\d`, nil))
	for name, o := range map[string]*weir.GroupOptions{
		"billing": {MaxAttempts: 2, RetryDelay: time.Hour}, "paused": nil, "idle": {Mode: weir.Queue},
	} {
		noError(t, c.CreateGroup(ctx, "orders", name, o))
	}
	for i := range 5 {
		_, err := c.Produce(ctx, "orders", weir.Message{Payload: i})
		noError(t, err)
	}
	_, err := c.PauseGroup(ctx, "orders", "paused")
	noError(t, err)

	hold, held := make(chan struct{}), make(chan struct{})
	k, err := c.NewConsumer("orders", "billing", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
		switch m.Value {
		case 0:
			return weir.Dead(errors.New("no"))
		case 1:
			return errors.New("later")
		case 4:
			close(held)
			<-hold
		}
		return nil
	}), nil)
	noError(t, err)
	consumers := metrics.NewConsumers()
	consumers.Add("orders", "billing", k)
	run(t, k)
	release := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(release) // before the consumer is stopped
	<-held
	collector := metrics.New(c, nil)
	eventually(t, "the consumer is noted", func() bool {
		return scrape(t, collector)[`weir_group_consumers{group="billing",topic="orders"}`] == 1
	})

	// A transaction that has produced, and a message behind it.
	conn := connect(t, dsn)
	tx, err := conn.Begin(ctx)
	noError(t, err)
	_, err = c.ProduceTx(ctx, tx, "orders", weir.Message{Payload: 5})
	noError(t, err)
	_, err = c.Produce(ctx, "orders", weir.Message{Payload: 6})
	noError(t, err)
	eventually(t, "what could be settled is settled", func() bool {
		topic, err := c.Topic(ctx, "orders")
		noError(t, err)
		return topic.Settled == 5
	})
	got := scrape(t, collector, consumers)
	is(t, got, map[string]float64{
		"weir_up":                                             1,
		"weir_maintenance_suspended":                          0,
		`weir_topic_head_id{topic="orders"}`:                  7,
		`weir_topic_unsettled_messages{topic="orders"}`:       2,
		`weir_topic_messages{topic="orders"}`:                 7,
		`weir_topic_segments{topic="orders"}`:                 2, // one ahead
		`weir_topic_blockers{topic="orders"}`:                 1,
		`weir_topic_blockers{topic="a \"b\" c\\d"}`:           0,
		`weir_topic_head_id{topic="a \"b\" c\\d"}`:            0,
		`weir_topic_unsettled_messages{topic="a \"b\" c\\d"}`: 0,

		`weir_group_lag_messages{group="paused",topic="orders"}`:           7,
		`weir_group_paused{group="paused",topic="orders"}`:                 1,
		`weir_group_paused{group="billing",topic="orders"}`:                0,
		`weir_group_leases{group="billing",topic="orders"}`:                1,
		`weir_group_dead_messages{group="billing",topic="orders"}`:         1,
		`weir_group_retrying_messages{group="billing",topic="orders"}`:     1,
		`weir_group_waiting_messages{group="billing",topic="orders"}`:      0,
		`weir_group_missed_messages_total{group="billing",topic="orders"}`: 0,
		`weir_group_consumers{group="billing",topic="orders"}`:             1,
		`weir_group_consumers{group="idle",topic="orders"}`:                0,
		`weir_group_committed_id{group="idle",topic="orders"}`:             0,

		`weir_consumer_handled_messages_total{group="billing",topic="orders"}`: 2,
		`weir_consumer_failed_attempts_total{group="billing",topic="orders"}`:  2,
		`weir_consumer_lost_leases_total{group="billing",topic="orders"}`:      0,
		`weir_consumer_executing_handlers{group="billing",topic="orders"}`:     1,
		`weir_consumer_buffered_messages{group="billing",topic="orders"}`:      1,
		`weir_consumer_hung_handlers{group="billing",topic="orders"}`:          0,
	})
	for _, name := range []string{
		"weir_scrape_duration_seconds", `weir_topic_size_bytes{topic="orders"}`, `weir_topic_oldest_blocker_age_seconds{topic="orders"}`,
		`weir_group_lag_seconds{group="paused",topic="orders"}`,
	} {
		if got[name] <= 0 {
			t.Errorf("%s is %v, want more than 0", name, got[name])
		}
	}

	noError(t, tx.Commit(ctx))
	release()
	_, err = c.SuspendMaintenance(ctx, true)
	noError(t, err)
	eventually(t, "the group is done", func() bool {
		return scrape(t, collector)[`weir_group_committed_id{group="billing",topic="orders"}`] == 7
	})
	is(t, scrape(t, collector, consumers), map[string]float64{
		"weir_maintenance_suspended":                                           1,
		`weir_topic_unsettled_messages{topic="orders"}`:                        0,
		`weir_topic_blockers{topic="orders"}`:                                  0,
		`weir_topic_oldest_blocker_age_seconds{topic="orders"}`:                0,
		`weir_group_lag_messages{group="billing",topic="orders"}`:              0,
		`weir_group_lag_seconds{group="billing",topic="orders"}`:               0,
		`weir_consumer_handled_messages_total{group="billing",topic="orders"}`: 5,
		`weir_consumer_executing_handlers{group="billing",topic="orders"}`:     0,
	})
}

// TestConsumersOfAGroup: consumers of the same group are one series, and one that died is not counted, whatever it holds.
func TestConsumersOfAGroup(t *testing.T) {
	t.Parallel()
	c, dsn := open(t)
	ctx := t.Context()
	noError(t, c.CreateTopic(ctx, "t", nil))
	noError(t, c.CreateGroup(ctx, "t", "g", nil))
	consumers := metrics.NewConsumers()
	for range 3 {
		k, err := c.NewConsumer("t", "g", weir.Handle(func(context.Context, *weir.Received[int]) error { return nil }), nil)
		noError(t, err)
		consumers.Add("t", "g", k)
		run(t, k)
	}
	for i := range 20 {
		_, err := c.Produce(ctx, "t", weir.Message{Payload: i})
		noError(t, err)
	}
	eventually(t, "all is handled", func() bool {
		return scrape(t, consumers)[`weir_consumer_handled_messages_total{group="g",topic="t"}`] == 20
	})
	collector := metrics.New(c, nil)
	eventually(t, "three run", func() bool { return scrape(t, collector)[`weir_group_consumers{group="g",topic="t"}`] == 3 })
	conn := connect(t, dsn)
	for _, statement := range []string{
		// One that has died an hour ago, and one that says nothing of itself but holds a message.
		`insert into weir.consumer (group_id, name, seen_at) select id, 'died', clock_timestamp() - interval '1 hour' from weir.consumer_group`,
		`select weir.pause_group('t', 'g')`,
		`select weir.create_group('t', 'sql')`,
		`select weir.claim('t', 'sql', 'silent')`,
	} {
		_, err := conn.Exec(ctx, statement)
		noError(t, err)
	}
	is(t, scrape(t, collector), map[string]float64{
		`weir_group_consumers{group="g",topic="t"}`:   3,
		`weir_group_consumers{group="sql",topic="t"}`: 1,
	})
}

// buffer is what a logger writes to.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// TestScrapeFails: a scrape that runs into its time limit, or into an error, is weir_up 0 and no failure of the scrape. It is said
// once.
func TestScrapeFails(t *testing.T) {
	t.Parallel()
	c, dsn := open(t)
	ctx := t.Context()
	noError(t, c.CreateTopic(ctx, "t", nil))
	var log buffer
	collector := metrics.New(c, &metrics.Options{Timeout: 200 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	fails := func(name string, collector *metrics.Collector) {
		t.Helper()
		began := time.Now()
		got := scrape(t, collector)
		is(t, got, map[string]float64{"weir_up": 0})
		if took := time.Since(began); took > 5*time.Second || len(got) != 2 || got["weir_scrape_duration_seconds"] <= 0 {
			t.Errorf("%s: after %v a scrape gives %v", name, took, got)
		}
	}
	conn := connect(t, dsn)
	_, err := conn.Exec(ctx, "begin; lock table weir.topic in access exclusive mode")
	noError(t, err)
	fails("a lock", collector)
	fails("a lock", collector)
	_, err = conn.Exec(ctx, "rollback")
	noError(t, err)
	noLimit := metrics.New(c, &metrics.Options{Timeout: -1})
	for range 2 {
		is(t, scrape(t, noLimit), map[string]float64{"weir_up": 1, `weir_topic_head_id{topic="t"}`: 0})
	}
	eventually(t, "a scrape succeeds", func() bool { return scrape(t, collector)["weir_up"] == 1 })
	if text := log.text.String(); strings.Count(text, "metrics cannot be read") != 1 || strings.Count(text, "metrics can be read again") != 1 ||
		!strings.Contains(text, "deadline exceeded") {
		t.Errorf("the log is\n%s", text)
	}
	_, err = conn.Exec(ctx, "alter schema weir rename to elsewhere")
	noError(t, err)
	fails("no schema", metrics.New(c, &metrics.Options{Logger: slog.New(slog.DiscardHandler)}))
}

// TestMonitorRole: a role with the grants that docs/metrics.md shows can scrape, and sees blockers of others and their age.
func TestMonitorRole(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t, &pgtest.Options{Fast: true}) // a role belongs to the whole server
	dsn := server.Database(t)
	c, err := weir.Open(t.Context(), dsn, &weir.Options{Migrate: true, NoMaintenance: true})
	noError(t, err)
	t.Cleanup(c.Close)
	ctx := t.Context()
	noError(t, c.CreateTopic(ctx, "t", nil))
	noError(t, c.CreateGroup(ctx, "t", "g", nil))
	k, err := c.NewConsumer("t", "g", weir.Handle(func(context.Context, *weir.Received[int]) error { return nil }), nil)
	noError(t, err)
	run(t, k)
	conn := connect(t, dsn)
	_, err = conn.Exec(ctx, "create role monitor login; grant usage on schema weir to monitor; "+block(t, "sql"))
	noError(t, err)
	tx, err := connect(t, dsn).Begin(ctx)
	noError(t, err)
	_, err = c.ProduceTx(ctx, tx, "t", weir.Message{Payload: 1})
	noError(t, err)
	_, err = c.Produce(ctx, "t", weir.Message{Payload: 2})
	noError(t, err)

	as, err := pgx.ParseConfig(dsn)
	noError(t, err)
	monitor, err := weir.Open(ctx, fmt.Sprintf("host=%s port=%d dbname=%s user=monitor", as.Host, as.Port, as.Database), &weir.Options{NoMaintenance: true, NoListen: true})
	noError(t, err)
	t.Cleanup(monitor.Close)
	// Far from when it was last written that the consumer is there.
	_, err = conn.Exec(ctx, "update weir.consumer set seen_at = clock_timestamp() - interval '2 hours'")
	noError(t, err)
	collector := metrics.New(monitor, nil)
	eventually(t, "the consumer is seen", func() bool {
		got := scrape(t, collector)
		return got["weir_up"] == 1 && got[`weir_group_consumers{group="g",topic="t"}`] == 1
	})
	got := scrape(t, collector)
	is(t, got, map[string]float64{`weir_topic_blockers{topic="t"}`: 1})
	if got[`weir_topic_oldest_blocker_age_seconds{topic="t"}`] <= 0 {
		t.Error("the blocker has no age")
	}
	noError(t, tx.Rollback(ctx))
}

const document = "../docs/metrics.md"

// block is the first fenced block of that language in the document.
func block(t *testing.T, language string) string {
	t.Helper()
	text, err := os.ReadFile(document)
	noError(t, err)
	_, rest, found := strings.Cut(string(text), "\n```"+language+"\n")
	inner, _, closed := strings.Cut(rest, "\n```\n")
	if !found || !closed {
		t.Fatalf("%s has no block of %s", document, language)
	}
	return inner
}

// exported are all metrics, each as a row of the tables in docs/metrics.md.
func exported(t *testing.T) map[string]string {
	t.Helper()
	c, _ := open(t)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	noError(t, c.CreateGroup(t.Context(), "t", "g", nil))
	k, err := c.NewConsumer("t", "g", weir.Handle(func(context.Context, *weir.Received[int]) error { return nil }), nil)
	noError(t, err)
	consumers := metrics.NewConsumers()
	consumers.Add("t", "g", k)
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(metrics.New(c, nil), consumers)
	families, err := registry.Gather()
	noError(t, err)
	rows := map[string]string{}
	for _, f := range families {
		if len(f.Metric) != 1 {
			t.Errorf("%s has %d series, want 1", f.GetName(), len(f.Metric))
		}
		var labels []string
		for _, l := range []string{"topic", "group"} {
			for _, have := range f.Metric[0].Label {
				if have.GetName() == l {
					labels = append(labels, "`"+l+"`")
				}
			}
		}
		rows[f.GetName()] = fmt.Sprintf("| `%s` | %s | %s | %s |", f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), f.GetHelp())
	}
	descs := make(chan *prometheus.Desc, 100)
	metrics.New(c, nil).Describe(descs)
	consumers.Describe(descs)
	if n := len(descs); n != len(rows) {
		t.Errorf("%d metrics are described, %d are there", n, len(rows))
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("names and help: %v, %v", problems, err)
	}
	return rows
}

var name = regexp.MustCompile(`\bweir_\w+`)

// TestDocument: the tables of docs/metrics.md are what the collectors describe, and it names no other metric.
func TestDocument(t *testing.T) {
	t.Parallel()
	rows := exported(t)
	text, err := os.ReadFile(document)
	noError(t, err)
	var listed []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `weir_") {
			listed = append(listed, strings.TrimSpace(line))
		}
	}
	for _, row := range rows {
		if !slices.Contains(listed, row) {
			t.Errorf("%s lacks\n%s", document, row)
		}
	}
	if len(listed) != len(rows) {
		t.Errorf("%s lists %d metrics, there are %d", document, len(listed), len(rows))
	}
	for _, n := range name.FindAllString(string(text), -1) {
		if rows[n] == "" {
			t.Errorf("%s names %s, there is no such metric", document, n)
		}
	}
}

// TestDashboard: docs/grafana.json asks for metrics that exist, and for each of them, from the data source that its variable names.
func TestDashboard(t *testing.T) {
	t.Parallel()
	rows := exported(t)
	text, err := os.ReadFile("../docs/grafana.json")
	noError(t, err)
	var dashboard struct {
		Title      string
		Panels     []any
		Templating struct{ List []struct{ Name, Type string } }
	}
	noError(t, json.Unmarshal(text, &dashboard))
	if dashboard.Title == "" || len(dashboard.Panels) == 0 || len(dashboard.Templating.List) == 0 || dashboard.Templating.List[0].Type != "datasource" {
		t.Errorf("title %q, %d panels, variables %v", dashboard.Title, len(dashboard.Panels), dashboard.Templating.List)
	}
	asked, places, ids := map[string]bool{}, map[[2]float64]bool{}, map[float64]bool{}
	var visit func(v any)
	visit = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, x := range v {
				visit(x)
			}
		case map[string]any:
			for _, field := range []string{"expr", "definition"} {
				if query, ok := v[field].(string); ok {
					names := name.FindAllString(query, -1)
					if len(names) == 0 {
						t.Errorf("%q asks for no metric", query)
					}
					for _, n := range names {
						asked[n] = true
						if rows[n] == "" {
							t.Errorf("it asks for %s, there is no such metric", n)
						}
					}
					if want := map[string]any{"type": "prometheus", "uid": "${datasource}"}; !reflect.DeepEqual(v["datasource"], want) {
						t.Errorf("%q asks %v", query, v["datasource"])
					}
				}
			}
			for _, x := range v {
				visit(x)
			}
		}
	}
	var all any
	noError(t, json.Unmarshal(text, &all))
	visit(all)
	for _, p := range dashboard.Panels {
		p := p.(map[string]any)
		at := p["gridPos"].(map[string]any)
		place, id := [2]float64{at["x"].(float64), at["y"].(float64)}, p["id"].(float64)
		if places[place] || ids[id] {
			t.Errorf("panel %v %q: its id or its place is another's", id, p["title"])
		}
		places[place], ids[id] = true, true
	}
	for n := range rows {
		if !asked[n] {
			t.Errorf("it does not show %s", n)
		}
	}
}
