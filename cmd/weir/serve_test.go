package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/internal/pgtest"
)

// fetch gets a page.
func fetch(t *testing.T, url string) (status int, text string) {
	t.Helper()
	client := http.Client{Timeout: 20 * time.Second}
	r, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(body)
}

// TestServe: metrics and health while the database answers, while it does not, and again; a signal ends it in order.
func TestServe(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	c := &cli{t: t, dsn: server.Database(t)}
	c.ok("", "migrate")
	c.ok("", "topic", "create", "events")
	c.ok("", "group", "create", "events", "audit")
	c.ok("1\n2\n", "produce", "events")

	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		cmd := c.command("serve", "--metrics", "127.0.0.1:0", "--output", "json")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() }) // where the test ends before
		var info serveJSON
		if err := json.NewDecoder(out).Decode(&info); err != nil {
			t.Fatalf("%v\n%s", err, errs.String())
		}
		healthy := func(want int) {
			t.Helper()
			if status, text := fetch(t, info.Health); status != want {
				t.Errorf("/healthz: %d %s, want %d", status, text, want)
			}
		}
		scraped := func(lines ...string) string {
			t.Helper()
			status, text := fetch(t, info.Metrics)
			if status != http.StatusOK {
				t.Errorf("/metrics: %d", status)
			}
			for _, line := range lines {
				if !strings.Contains("\n"+text, "\n"+line+"\n") {
					t.Errorf("/metrics lacks %q:\n%s", line, text)
				}
			}
			return text
		}
		lag := `weir_group_lag_messages{group="audit",topic="events"} 2`
		scraped("weir_up 1", lag)
		healthy(http.StatusOK)
		if status, _ := fetch(t, "http://"+info.Address+"/nothing"); status != http.StatusNotFound {
			t.Errorf("another page: %d", status)
		}
		if sig == syscall.SIGTERM {
			if err := server.Crash(t.Context()); err != nil {
				t.Fatal(err)
			}
			if text := scraped("weir_up 0"); strings.Contains(text, "weir_group") {
				t.Errorf("without a database there are figures:\n%s", text)
			}
			healthy(http.StatusServiceUnavailable)
			c.fails(exitFailed, "", []string{"serve", "--metrics", "127.0.0.1:0"}, "WEIR_DSN")
			if err := server.StartAgain(t.Context()); err != nil {
				t.Fatal(err)
			}
			scraped("weir_up 1", lag)
			healthy(http.StatusOK)
		}
		c.fails(exitFailed, "", []string{"serve", "--metrics", info.Address}, "address already in use")
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if code := c.code(cmd.Wait()); code != exitOK {
			t.Errorf("%v: exit code %d\n%s", sig, code, errs.String())
		}
		if began := strings.Contains(errs.String(), "metrics cannot be read"); began != (sig == syscall.SIGTERM) {
			t.Errorf("%v: it said\n%s", sig, errs.String())
		}
	}
	c.fails(exitUsage, "", []string{"serve", "--metrics", "19347"}, `HOST:PORT`)
	c.fails(exitUsage, "", []string{"serve", "--timeout", "0s"}, `--timeout is 0s`)
	c.fails(exitUsage, "", []string{"serve", "more"}, "too many")
}

// TestServeFinishesScrapes: a signal does not cut off a scrape that has begun.
func TestServeFinishesScrapes(t *testing.T) {
	c := newCLI(t)
	cmd := c.command("serve", "--metrics", "127.0.0.1:0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	line := make([]byte, 200)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.TrimSpace(string(line[:n]))
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	waits := func(want bool) {
		t.Helper()
		for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
			var got bool
			err := conn.QueryRow(t.Context(), "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')").Scan(&got)
			if err != nil || time.Since(began) > 10*time.Second {
				t.Fatalf("no scrape waits for the lock: %v", err)
			}
			if got == want {
				return
			}
		}
	}
	if _, err := conn.Exec(t.Context(), "begin; lock table weir.topic in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		status int
		text   string
	}
	answered := make(chan answer, 1)
	go func() {
		r, err := http.Get(url)
		if err != nil {
			answered <- answer{text: err.Error()}
			return
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		answered <- answer{r.StatusCode, string(text)}
	}()
	waits(true)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	// It listens no more once the signal has arrived.
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		r, err := http.Get(url + "/nothing")
		if err != nil {
			break
		}
		_ = r.Body.Close()
		if time.Since(began) > 3*time.Second {
			t.Fatal("it goes on listening")
		}
	}
	if _, err := conn.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	if got := <-answered; got.status != http.StatusOK || !strings.Contains(got.text, "\nweir_up 1\n") {
		t.Errorf("the scrape gave %d %s", got.status, got.text)
	}
	if code := c.code(cmd.Wait()); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}
