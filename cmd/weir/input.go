package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/weirhq/weir"
)

// line is a line of the input, without its line break.
type line struct {
	text   []byte
	file   string
	number int
	err    error // the input could not be read any further
}

func (l line) String() string { return fmt.Sprintf("%s:%d", l.file, l.number) }

// input is the files that lines are read from, "-" for standard input.
type input struct {
	names []string
	stdin io.Reader
	// size is the sum of the files' sizes, or -1 when one of them is no regular file.
	size int64
}

// newInput checks that all files can be opened, so that a wrong name is found before anything is stored.
func newInput(names []string, stdin io.Reader) (*input, error) {
	if len(names) == 0 {
		names = []string{"-"}
	}
	in := &input{names: names, stdin: stdin}
	for _, name := range names {
		var f *os.File
		if name == "-" {
			if standardClosed(stdin) {
				return nil, errors.New("read standard input: it is closed; name a file, or pipe something in")
			}
			f, _ = stdin.(*os.File)
		} else {
			var err error
			if f, err = os.Open(name); err != nil {
				return nil, err
			}
			defer f.Close()
		}
		if f == nil {
			in.size = -1
			continue
		}
		stat, err := f.Stat()
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		if stat.IsDir() {
			return nil, fmt.Errorf("read %s: it is a directory", name)
		}
		if !stat.Mode().IsRegular() || in.size < 0 {
			in.size = -1
			continue
		}
		in.size += stat.Size()
	}
	return in, nil
}

// lines sends every line, until ctx ends or the input cannot be read.
func (in *input) lines(ctx context.Context, to chan<- line) {
	defer close(to)
	send := func(l line) bool {
		select {
		case to <- l:
			return l.err == nil
		case <-ctx.Done():
			return false
		}
	}
	for _, name := range in.names {
		var (
			file io.Reader = in.stdin
			l              = line{file: "stdin"}
		)
		if name != "-" {
			l.file = name
			f, err := os.Open(name)
			if err != nil {
				l.err = err
				send(l)
				return
			}
			defer f.Close()
			file = f
		}
		reader := bufio.NewReaderSize(file, 256<<10)
		for {
			l.number++
			text, err := readLine(reader)
			l.text = text
			if err != nil && err != io.EOF {
				l.err = err
				var path *os.PathError
				if errors.As(err, &path) {
					l.err = fmt.Errorf("read %s: %w", l.file, path.Err)
				}
			}
			if (err == nil || l.err != nil || len(text) > 0) && !send(l) {
				return
			}
			if err == io.EOF {
				break
			}
		}
	}
}

// readLine reads a line of any length that a payload can have.
func readLine(r *bufio.Reader) ([]byte, error) {
	var text []byte
	for {
		part, err := r.ReadSlice('\n')
		text = append(text, part...)
		if len(text) > weir.MaxPayload+1 {
			return nil, fmt.Errorf("the line is longer than the %d bytes that a payload can have", weir.MaxPayload)
		}
		if err == bufio.ErrBufferFull {
			continue
		}
		return bytes.TrimSuffix(text, []byte("\n")), err
	}
}

// stringJSON is a line as a JSON string.
func stringJSON(text []byte) ([]byte, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("it is not valid UTF-8, which a JSON string must be; a topic of format bytes takes it")
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(string(text)); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), nil
}

// field finds the scalar at a dotted path of a JSON document, as text: a string's content, or a number or boolean as it is
// written. found is false when it is missing or null.
func field(document []byte, path string) (text string, found bool, err error) {
	value := json.RawMessage(document)
	for name := range strings.SplitSeq(path, ".") {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(value, &object); err != nil {
			var syntax *json.SyntaxError
			if errors.As(err, &syntax) {
				return "", false, fmt.Errorf("it is not JSON: %w", err)
			}
			return "", false, nil // no object here, so no such field
		}
		var ok bool
		if value, ok = object[name]; !ok {
			return "", false, nil
		}
	}
	switch value[0] {
	case 'n':
		return "", false, nil
	case '{', '[':
		return "", false, fmt.Errorf("field %s is an object or array, which is no key", path)
	case '"':
		err := json.Unmarshal(value, &text)
		return text, text != "", err
	}
	return string(value), true, nil
}
