package examples_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// build compiles an example.
func build(t *testing.T, name string) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), name)
	out, err := exec.Command("go", "build", "-o", binary, "./"+name).CombinedOutput()
	if err != nil {
		t.Fatalf("go build ./%s: %v\n%s", name, err, out)
	}
	return binary
}

// command gives an example that works on a database. It is ended after a minute.
func command(t *testing.T, binary, dsn string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, binary)
	cmd.Env = append(os.Environ(), "WEIR_DSN="+dsn)
	cmd.Stderr = os.Stderr
	return cmd
}

// drained waits until a group is done with all there is.
func drained(t *testing.T, dsn, topic, group string) {
	t.Helper()
	client, err := weir.Open(t.Context(), dsn, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		g, err := client.Group(t.Context(), topic, group)
		if err != nil {
			t.Fatal(err)
		}
		if g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Dead == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("group %s of topic %s is not done: %+v", group, topic, g)
		}
	}
}

func TestHello(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	cmd := command(t, build(t, "hello"), dsn)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "\"hello\"\n" {
		t.Errorf("it printed %q (%v)", line, err)
	}
	drained(t, dsn, "greetings", "printer")
	// It would go on.
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
}

func TestOutbox(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	binary := build(t, "outbox")
	out, err := command(t, binary, dsn).Output()
	want := "bob: refused: no credit\nada: order confirmed\neve: order confirmed\n"
	if err != nil || string(out) != want {
		t.Errorf("it printed %q (%v), want %q", out, err, want)
	}
	drained(t, dsn, "orders", "mail")
	// A second time: everything exists already.
	out, err = command(t, binary, dsn).Output()
	if err != nil || strings.Count(string(out), "confirmed") != 2 {
		t.Errorf("the second time it printed %q (%v)", out, err)
	}
}
