package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// demoBinary is this command as a file: the demo starts itself anew for its consumers.
func demoBinary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return path
}

func TestDemoCommand(t *testing.T) {
	binary := demoBinary(t)
	temp := t.TempDir()
	start := func(args ...string) (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
		t.Helper()
		cmd = exec.Command(binary, append([]string{"demo"}, args...)...)
		cmd.Env = append(os.Environ(), "TMPDIR="+temp, "WEIR_DSN=", "WEIR_SCHEMA=")
		stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
		cmd.Stdout, cmd.Stderr = stdout, stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, stdout, stderr
	}
	clean := func() {
		t.Helper()
		if left, err := filepath.Glob(filepath.Join(temp, "weir-demo-*")); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	}

	t.Run("json", func(t *testing.T) {
		cmd, stdout, stderr := start("--for", "2s", "--rate", "300", "--seed", "5", "--output", "json")
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		var v struct {
			OK       bool
			Lost     *int
			Seed     int
			Produced int
			Groups   []struct{ Handled int }
		}
		if err := json.Unmarshal(stdout.Bytes(), &v); err != nil {
			t.Fatalf("%v in %q", err, stdout)
		}
		if !v.OK || v.Lost == nil || *v.Lost != 0 || v.Seed != 5 || len(v.Groups) != 3 || v.Produced == 0 || v.Groups[0].Handled != v.Produced {
			t.Errorf("verdict is %s", stdout)
		}
		if !strings.Contains(stderr.String(), "seed 5") {
			t.Errorf("standard error is %q", stderr)
		}
		clean()
	})

	t.Run("interrupted", func(t *testing.T) {
		cmd, stdout, stderr := start("--for", "1m", "--rate", "300")
		time.AfterFunc(6*time.Second, func() { _ = cmd.Process.Signal(os.Interrupt) })
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		if !strings.HasSuffix(stdout.String(), "\nlost 0\n") {
			t.Errorf("output is\n%s", stdout)
		}
		clean()
	})

	t.Run("no server to be had", func(t *testing.T) {
		t.Setenv("WEIR_PG_BIN", temp)
		cmd, _, stderr := start()
		_ = cmd.Wait()
		if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(stderr.String(), "remedy") {
			t.Errorf("%v, %s", cmd.ProcessState, stderr)
		}
		clean()
	})

	t.Run("usage", func(t *testing.T) {
		for _, args := range [][]string{{"--rate", "0"}, {"--for", "10ms"}, {"--producers", "101"}, {"--for", "24h"}, {"--role", "x"}, {"x"}} {
			cmd, _, stderr := start(args...)
			if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 2 {
				t.Errorf("%v: %v, %s", args, cmd.ProcessState, stderr)
			}
		}
	})

	// A consumer's process ends with the one that started it, whatever ended that.
	t.Run("orphan", func(t *testing.T) {
		cmd := exec.Command(binary, "demo", "--role", "consumer")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write([]byte(`{"DSN": "host=127.0.0.1 port=1", "Topic": "t", "Group": "g", "Folder": "` + temp + `", "Lease": 1000000000, "Concurrency": 1}`)); err != nil {
			t.Fatal(err)
		}
		_ = in.Close()
		timer := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Signal(syscall.SIGKILL) })
		defer timer.Stop()
		_ = cmd.Wait()
		if cmd.ProcessState.ExitCode() < 0 {
			t.Error("it goes on")
		}
	})
}
