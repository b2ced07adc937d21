{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* The name of all objects. */}}
{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "quire.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "quire.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ include "quire.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "quire.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (gt (int .Values.gpu.count) 0 | ternary "-cuda" "")) }}
{{- printf "%s:%s" .Values.image.repository $tag }}
{{- end }}

{{- define "quire.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "quire.fullname" .) "default") }}
{{- end }}

{{- /* Not empty if pods on several nodes cannot have the cache at once. */}}
{{- define "quire.cacheOfOneNode" -}}
{{- if and (eq .Values.cache.type "claim") (not (has "ReadWriteMany" .Values.cache.accessModes)) }}true{{ end }}
{{- end }}

{{- /* A value of settings as its variable holds it: lists with commas, objects as JSON. */}}
{{- define "quire.settingValue" -}}
{{- if kindIs "string" . }}{{ . }}
{{- else if kindIs "slice" . }}{{ join "," . }}
{{- else }}{{ toJson . }}
{{- end }}
{{- end }}

{{- define "quire.apiKeyVariable" -}}
name: QUIRE_API_KEY
valueFrom:
  secretKeyRef:
    name: {{ .Values.apiKey.existingSecret }}
    key: {{ .Values.apiKey.key }}
{{- end }}
